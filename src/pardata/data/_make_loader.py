"""make_loader: agrees on its arguments with the other ranks, and builds a Loader."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Literal

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from pardata.data._loader import Loader, Parts
from pardata.data._loader_arguments import Arguments, agreed
from pardata.data._order import Requests
from pardata.data._placement import Placement
from pardata.data._position import Recipe
from pardata.data._reader import Collation, Reader
from pardata.data._sample_seeds import Seeds
from pardata.data._stream import Stream
from pardata.data._streamed import Streamed
from pardata.data._workers import Source
from pardata.ranks._device import has_streams
from pardata.seeds._default_seeds import default_seed, take_number
from pardata.values._arguments import suggesting


@suggesting
def make_loader(
    dataset: Dataset[Any],
    batch_size: int | None = None,
    *,
    distributed: bool | Literal["auto"] = "auto",
    shuffle: bool = False,
    drop_last: bool | None = None,
    microbatch_size: int | None = None,
    strided: bool = False,
    sampler: Sampler[Any] | None = None,
    batch_sampler: Iterable[Sequence[Any]] | None = None,
    sharded: bool = False,
    num_workers: int | Literal["auto"] = "auto",
    seed: int | None = None,
    reproducible: bool = True,
    device: torch.device | str | None = "auto",
    batch_transform: Callable[[Any], Any] | None = None,
    prefetch: int = 1,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool | None = None,
    timeout: float = 0,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: BaseContext | str | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool | None = None,
) -> Loader:
    """Return a loader of this rank's share of each *global* batch of `batch_size` samples.

    Step k of an epoch holds the same samples at every world size; each rank gets a run of them,
    counts differing by at most one, collated as ``DataLoader`` would and moved to the device. All
    ranks yield the same number of batches. No sample is repeated, and in an ordered loader none is
    left out, so that an evaluation counts each exactly once. Epochs advance by themselves, and
    ``state_dict()`` resumes at any step and any world size.

    A ``TensorDataset``, what `cache_dataset` returns, and a ``Subset`` or ``ConcatDataset`` of
    such are read by whole batches, and so is what has ``__getitems__``: the list of samples that
    it returns is collated, a batch in the form of a tensor, tuple or dict is taken as it is.

    Collective: every rank must call it (unless ``distributed=False``). Iterating is not collective,
    with two exceptions: ranks compare the order of a `sampler` at the start of each epoch, and
    agree on the start and the end of an ``IterableDataset``. In a single process it is a
    ``DataLoader`` with epochs.

    Args:
        dataset: map-style, with ``__getitem__`` and ``__len__``, or an ``IterableDataset``, which
            every rank and worker reads whole to keep its own part (but see `sharded`). Its
            ``set_epoch``, if it has one, is called where it is read, in workers too.
        batch_size: samples of one optimizer step, over all ranks. Required, unless there is a
            `batch_sampler`.
        distributed: ``"auto"`` shares out in a world larger than one; ``True`` insists on a
            launcher; ``False`` gives this process everything.
        shuffle: a new order each epoch, from `seed` and the epoch alone, in constant memory.
        drop_last: of an incomplete last global batch. ``None`` drops it where `shuffle` or a
            `sampler` says that this is training, and keeps it otherwise.
        microbatch_size: cut each step into consecutive pieces of so many samples, whatever the
            world size, and give each rank a run of whole ones: it yields `Microbatches`.
        strided: give rank r of W the microbatches r, r + W, r + 2W and so on, in place of a run:
            strategy ``"exact_fsdp"`` adds them in this order. Steps hold the same samples.
        sampler: yields the order of the whole epoch, the same on every rank, in place of `shuffle`;
            drawn under a seed of its own, with ``set_epoch`` called where it has one. Its length
            may change between epochs. A sample that it repeats gets other random numbers.
        batch_sampler: yields the *global* batches of the whole epoch, each a list of indices, the
            same on every rank, in place of `batch_size`, `shuffle`, `sampler` and `drop_last`;
            drawn as a `sampler` is. Without `microbatch_size` each must have one for every rank.
        sharded: the ``IterableDataset`` yields, on each rank and worker, samples that no other
            yields: batched as they come, until no rank has any (with `drop_last`: until one has
            no whole share). A worker is told its number by ``get_worker_info()``; the rank must
            be taken from `world` when the dataset is made.
        num_workers: per rank. ``"auto"``: 0 for a dataset that is indexed by whole batches, else
            the cores this rank may use, less one, at most 8.
        seed: of the order, the samples and the workers. ``None`` is rank 0's
            ``torch.initial_seed()`` for the first loader; each further one gets another seed, made
            of that and of its number. `seed_everything` begins to count anew.
        reproducible: seed the default generators of Python, NumPy and PyTorch before each sample
            is read, from `seed`, the epoch and the sample, and put them back after each batch: an
            augmentation depends neither on the workers nor on the world size. For an
            ``IterableDataset`` they are seeded before each batch, in any case. `collate_fn`,
            `batch_transform` and ``__getitems__`` are seeded for each microbatch; without
            microbatches they may not draw.
        device: where the batches go; ``"auto"`` is the world's, ``None`` leaves them on the CPU.
        batch_transform: applied to each batch, or microbatch, on the device.
        prefetch: on a GPU, how many batches are copied and transformed ahead of the loop, on a
            stream of their own; 0 for none.
        collate_fn: as in ``DataLoader``.
        pin_memory: as in ``DataLoader``, but what is on a GPU already stays there; ``None`` pins
            where batches go to a GPU.
        timeout: as in ``DataLoader``.
        worker_init_fn: as in ``DataLoader``.
        multiprocessing_context: as in ``DataLoader``.
        prefetch_factor: as in ``DataLoader``.
        persistent_workers: as in ``DataLoader``; ``None`` keeps workers across epochs.

    Raises:
        TypeError: for a dataset that cannot be indexed, and for sizes that are no integers.
        ValueError: for a batch size that is not positive, smaller than the world, or larger than a
            dataset of which incomplete batches are dropped; for `strided` without a
            `microbatch_size`; for `shuffle` with a `sampler`, or
            either, or a batch size, with a `batch_sampler`; for a shuffled last batch with fewer
            samples than ranks.
        RuntimeError: where ranks disagree, with a table of who has what, or no group was joined.
            All on every rank.

    >>> data = torch.utils.data.TensorDataset(torch.arange(5))
    >>> [batch.tolist() for (batch,) in make_loader(data, batch_size=2)]
    [[0, 1], [2, 3], [4]]
    """
    args = agreed(**locals())
    loader = Loader(args.plan, _parts(args), partial(_with_seed, args))
    if args.initial_seed is not None:
        take_number(torch.initial_seed(), args.number, loader)
    return loader


def _parts(args: Arguments) -> Parts:
    """Return what the arguments, which have been checked and agreed on, describe."""
    ranks, plan = args.ranks, args.plan
    seeds = Seeds(args.seed, args.reproducible, args.microbatch_size is not None)
    collation = Collation(args.collate_fn, seeds, args.here.rank)
    loader_pins, we_pin = _who_pins(args)
    workers = {"pin_memory": loader_pins, **args.workers}
    source: Source
    if isinstance(args.dataset, IterableDataset):
        stream = Stream(args.dataset, collation, plan, sharded=args.sharded)
        source = Streamed(stream, None, ranks, **workers)
    else:
        sampler = args.sampler if args.batch_sampler is None else args.batch_sampler
        to_workers = args.num_workers > 0
        requests = Requests(plan, ranks, args.seed, args.shuffle, sampler, to_workers)
        source = Source(Reader(args.dataset, collation), requests, ranks, **workers)
    placement = Placement(args.device, args.batch_transform, seeds, args.prefetch, we_pin)
    return _recipe(args), source, placement


def _with_seed(args: Arguments, seed: object) -> Parts | None:
    """Return the parts with the seed that another loader of this run got, if it got none itself."""
    initial = args.initial_seed
    if initial is None or all(default_seed(initial, number) != seed for number in range(1000)):
        return None
    return _parts(Arguments(**{**vars(args), "seed": seed}))


def _recipe(args: Arguments) -> Recipe:
    names = ("length", "batch_size", "microbatch_size", "shuffle", "drop_last", "seed")
    facts = {name: getattr(args, name) for name in names}
    for name in ("sampler", "batch_sampler"):
        given = getattr(args, name)
        facts[name] = None if given is None else type(given).__name__
        if given is not None:
            facts["length"] = None  # may change from epoch to epoch: the order is compared
    shards = f"{args.ranks.size} ranks with {args.num_workers} workers"
    facts["shards"] = shards if args.sharded else None
    return Recipe(facts, isinstance(args.dataset, IterableDataset))


def _who_pins(args: Arguments) -> tuple[bool, bool]:
    """Return whether ``DataLoader`` pins the batches, and whether we do."""
    pin_memory = has_streams(args.device) if args.pin_memory is None else args.pin_memory
    # DataLoader refuses a tensor that is on a GPU already, which none that comes from a worker is.
    ours = pin_memory and args.num_workers == 0 and torch.accelerator.is_available()
    return pin_memory and not ours, ours
