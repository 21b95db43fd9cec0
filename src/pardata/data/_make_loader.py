"""make_loader: agrees on its arguments with the other ranks, and builds a Loader."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Literal

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from pardata.data._loader import Loader, Parts
from pardata.data._loader_arguments import agreed
from pardata.data._order import Requests
from pardata.data._placement import Placement
from pardata.data._position import Recipe
from pardata.data._reader import Collation, Reader
from pardata.data._sample_seeds import Seeds
from pardata.data._settings import Arguments, Settings
from pardata.data._stream import Stream
from pardata.data._streamed import Streamed
from pardata.data._workers import Source
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
    settings = agreed(Arguments(**locals()))
    loader = Loader(settings.plan, _parts(settings), partial(_with_seed, settings))
    if settings.numbered is not None:
        take_number(torch.initial_seed(), settings.numbered[1], loader)
    return loader


def _parts(settings: Settings) -> Parts:
    """Return what the arguments, which have been checked and agreed on, describe."""
    given, ranks, plan, workers = settings.given, settings.ranks, settings.plan, settings.workers
    seeds = Seeds(settings.seed, given.reproducible, given.microbatch_size is not None)
    collation = Collation(given.collate_fn, seeds, settings.here.rank)
    source: Source
    if isinstance(given.dataset, IterableDataset):
        stream = Stream(given.dataset, collation, plan, sharded=given.sharded)
        source = Streamed(stream, None, ranks, workers)
    else:
        sampler = given.sampler if given.batch_sampler is None else given.batch_sampler
        to_workers = workers["num_workers"] > 0
        requests = Requests(plan, ranks, settings.seed, given.shuffle, sampler, to_workers)
        source = Source(Reader(given.dataset, collation), requests, ranks, workers)
    places = settings.device, given.batch_transform, seeds, given.prefetch, settings.pins
    return _recipe(settings), source, Placement(*places)


def _with_seed(settings: Settings, seed: Any) -> Parts | None:
    """Return the parts with the seed that another loader of this run got, if it got none itself."""
    initial, _ = settings.numbered or (None, 0)
    if initial is None or all(default_seed(initial, number) != seed for number in range(1000)):
        return None
    return _parts(replace(settings, seed=seed))


def _recipe(settings: Settings) -> Recipe:
    given, plan = settings.given, settings.plan
    names = ("batch_size", "microbatch_size", "shuffle")
    facts = {
        "length": plan.length,
        **{name: getattr(given, name) for name in names},
        "drop_last": plan.drop_last,
        "seed": settings.seed,
    }
    for name in ("sampler", "batch_sampler"):
        drawn_by = getattr(given, name)
        facts[name] = None if drawn_by is None else type(drawn_by).__name__
        if drawn_by is not None:
            facts["length"] = None  # may change from epoch to epoch: the order is compared
    shards = f"{plan.size} ranks with {settings.workers['num_workers']} workers"
    facts["shards"] = shards if given.sharded else None
    return Recipe(facts, isinstance(given.dataset, IterableDataset))
