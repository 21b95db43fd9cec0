"""make_loader: checks its arguments, on all ranks together, and builds a Loader."""

from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from pardata.collective._agreement import agree, require_same
from pardata.data._checks import (
    check_callables,
    check_dataset,
    check_numbers,
    check_sizes,
    check_streaming,
    check_timeout,
    check_training_shares,
    length_of,
)
from pardata.data._loader import Loader, Setting
from pardata.data._order import Order, Requests
from pardata.data._placement import Placement
from pardata.data._plan import Plan
from pardata.data._position import Identity
from pardata.data._reader import Fetched, Reader, Seeds
from pardata.data._stream import Cut, Stream
from pardata.data._workers import choose_workers
from pardata.ranks._arguments import check_flag, checked_device
from pardata.ranks._logger import get_logger
from pardata.ranks._world import World, require_world, world

_log = get_logger(__name__)


def make_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    distributed: bool | Literal["auto"] = "auto",
    shuffle: bool = False,
    drop_last: bool | None = None,
    microbatch_size: int | None = None,
    sampler: Sampler[Any] | None = None,
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

    Collective in a world larger than one (unless ``distributed=False``), as is nothing the loader
    does later, save that a `sampler` is compared at the start of an epoch and the ends of an
    ``IterableDataset`` are. In a single process it is a ``DataLoader`` with epochs.

    Args:
        dataset: map-style, with ``__getitem__`` and ``__len__``, or an ``IterableDataset``, which
            every rank and worker reads whole to keep its own part (but see `sharded`).
        batch_size: samples of one optimizer step, over all ranks.
        distributed: ``"auto"`` shares out in a world larger than one; ``True`` insists on a
            launcher; ``False`` gives this process everything.
        shuffle: a new order each epoch, from `seed` and the epoch alone, in constant memory.
        drop_last: of an incomplete last global batch. ``None`` drops it where `shuffle` or a
            `sampler` says that this is training, and keeps it otherwise.
        microbatch_size: cut each step into consecutive pieces of so many samples, whatever the
            world size, and give each rank a run of whole ones: it yields `Microbatches`.
        sampler: yields the order of the whole epoch, the same on every rank, in place of `shuffle`;
            drawn under a seed of its own, with ``set_epoch`` called where it has one.
        sharded: the ``IterableDataset`` yields, on each rank and worker, samples that no other
            yields: batched as they come, until no rank has any (with `drop_last`: until one has
            no whole share). A worker is told its number by ``get_worker_info()``; the rank must
            be taken from `world` when the data set is made.
        num_workers: per rank. ``"auto"``: 0 for a data set that is indexed by whole batches, else
            the cores this rank may use, less one, at most 8.
        seed: of the order, the samples and the workers; ``None`` is rank 0's
            ``torch.initial_seed()``.
        reproducible: seed the default generators of Python, NumPy and PyTorch before each sample
            is read, from `seed`, the epoch and the sample, and put them back after each batch: an
            augmentation depends neither on the workers nor on the world size. `collate_fn`,
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
        TypeError: for a data set that cannot be indexed, and for sizes that are no integers.
        ValueError: for a batch size that is not positive, smaller than the world, or larger than a
            data set of which incomplete batches are dropped; for `shuffle` with a `sampler`; for a
            shuffled last batch with fewer samples than ranks.
        RuntimeError: where ranks disagree, with a table of who has what, or no group was joined.
            All on every rank.

    >>> data = torch.utils.data.TensorDataset(torch.arange(5))
    >>> [batch.tolist() for (batch,) in make_loader(data, batch_size=2)]
    [[0, 1], [2, 3], [4]]
    """
    here = _world_for(distributed)
    training = shuffle or sampler is not None
    drop_last = training if drop_last is None else drop_last

    def facts() -> dict[str, object]:
        flags = {"shuffle": shuffle, "drop_last": drop_last, "sharded": sharded}
        for name, flag in {**flags, "reproducible": reproducible}.items():
            check_flag(name, flag)
        check_dataset(dataset, sampler, shuffle=shuffle, sharded=sharded)
        length = length_of(dataset, sampler, sharded=sharded)
        check_sizes(batch_size, microbatch_size, length, here.size, drop_last=drop_last)
        if training and not drop_last and microbatch_size is None and length is not None:
            check_training_shares(batch_size, length, here.size)
        check_streaming(sharded=sharded, microbatch_size=microbatch_size)
        check_numbers(seed, prefetch)
        check_callables(
            collate_fn=collate_fn, batch_transform=batch_transform, worker_init_fn=worker_init_fn
        )
        _target(device, here)
        DataLoader(dataset, **reading())  # refuses what it does while the other ranks listen
        return {
            "the length": length,
            "batch_size": batch_size,
            "microbatch_size": microbatch_size,
            **flags,
            "reproducible": reproducible,
            "seed": seed,
        }

    def reading() -> dict[str, Any]:
        workers = choose_workers(num_workers, dataset, here)
        check_timeout(timeout, num_workers)
        # DataLoader refuses these without workers, and "auto" may find none on some ranks only.
        there = num_workers != "auto" or workers > 0
        persist = workers > 0 if persistent_workers is None else persistent_workers
        return {
            "num_workers": workers,
            "timeout": timeout if there else 0,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context if there else None,
            "prefetch_factor": prefetch_factor if there else None,
            "persistent_workers": persist and there,
        }

    told = agree(here, "make_loader", facts)
    require_same("make_loader", told, "Pass the same data set and arguments on every rank.")
    if seed is None:
        seed = _seed_of_rank_zero(here)
    _warn_of_uneven_shares(batch_size, microbatch_size, here.size, training=training)
    options = reading()
    workers: int = options["num_workers"]
    target = _target(device, here)
    loader_pins, we_pin = _who_pins(pin_memory, target, workers)
    seeds = Seeds(seed, reproducible, microbatch_size is not None)
    length = length_of(dataset, sampler, sharded=sharded)
    order: Order | None = None
    source: Requests | Stream
    read: Reader | Stream
    if isinstance(dataset, IterableDataset):
        cut = Cut(batch_size, drop_last, microbatch_size, here.rank, here.size, sharded)
        source = read = Stream(dataset, collate_fn, seeds, cut)
    else:
        assert length is not None  # noqa: S101  # checked above
        order = Order(here, length, seed, shuffle, sampler)
        plan = Plan(length, batch_size, drop_last, microbatch_size, here.rank, here.size)
        source = Requests(plan, order, to_workers=workers > 0)
        # The rank is that of the process, also where nothing is shared out.
        read = Reader(dataset, collate_fn, seeds, world().rank)
    loader: DataLoader[Fetched] = DataLoader(
        read,
        batch_size=None,  # what is read of a step is a batch already
        sampler=source if isinstance(source, Requests) else None,
        collate_fn=_as_it_is,
        pin_memory=loader_pins,
        generator=torch.Generator(),
        **options,
    )
    steps = None if length is None else len(Plan(length, batch_size, drop_last))
    identity = Identity(
        length,
        batch_size,
        microbatch_size,
        shuffle,
        drop_last,
        seed,
        None if sampler is None else type(sampler).__name__,
        f"{here.size} ranks with {workers} workers" if sharded else None,
    )
    placement = Placement(target, batch_transform, seeds, prefetch, we_pin)
    return Loader(
        loader, dataset, Setting(here, identity, source, steps, order, sharded, placement)
    )


def _as_it_is(fetched: Any) -> Any:
    return fetched


def _target(device: torch.device | str | None, here: World) -> torch.device | None:
    if device == "auto":
        return here.device
    return None if device is None else checked_device(device)


def _who_pins(
    pin_memory: bool | None,  # noqa: FBT001  # as the user passed it
    target: torch.device | None,
    workers: int,
) -> tuple[bool, bool]:
    """Return whether ``DataLoader`` pins the batches, and whether we do."""
    if pin_memory is None:
        pin_memory = target is not None and target.type == "cuda"
    # DataLoader refuses a tensor that is on a GPU already, which none that comes from a worker is.
    ours = pin_memory and workers == 0 and torch.cuda.is_available()
    return pin_memory and not ours, ours


def _warn_of_uneven_shares(
    batch_size: int, microbatch_size: int | None, size: int, *, training: bool
) -> None:
    if microbatch_size is not None:
        pieces = -(-batch_size // microbatch_size)
        if pieces < size:
            _log.warning(
                "a `batch_size` of %d in microbatches of %d is %d, fewer than the %d ranks: ranks "
                "%d to %d idle; make `microbatch_size` smaller",
                *(batch_size, microbatch_size, pieces, size, pieces, size - 1),
                ranks=[0],
                once=True,
            )
    elif training and batch_size % size:
        _log.warning(
            "`batch_size` %d leaves %d ranks shares that differ by one sample, which "
            "`pardata.backward` weights, while a loss.backward() of one's own takes the plain mean "
            "of their gradients: use `pardata.backward`, or choose a multiple of %d",
            *(batch_size, size, size),
            ranks=[0],
            once=True,
        )


def _world_for(distributed: object) -> World:
    if distributed is False:
        return replace(world(), rank=0, size=1)
    if distributed is not True and distributed != "auto":
        msg = f"`distributed` must be True, False or 'auto', but is {distributed!r}"
        raise ValueError(msg)
    here = require_world("make_loader")
    if distributed is True and (here.backend is None or here.launcher == "single"):
        msg = (
            "`distributed` must be 'auto' or False without a launcher, but is True: start the "
            "script with torchrun, srun or mpirun and call `pardata.init()` first"
        )
        raise RuntimeError(msg)
    return here


def _seed_of_rank_zero(here: World) -> int:
    told = agree(here, "make_loader(seed=None)", lambda: {"seed": torch.initial_seed()})
    seed = told[0]["seed"]
    assert isinstance(seed, int)  # noqa: S101  # for the type checker: it went through JSON
    return seed
