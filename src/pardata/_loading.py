"""make_loader: checks its arguments, on all ranks together, and builds a Loader."""

from collections.abc import Callable
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from pardata._agreement import agree
from pardata._loader import Loader, Order, ShareSampler
from pardata._logging import get_logger
from pardata._reading import Reader
from pardata._sampling import Plan
from pardata._store import require_same
from pardata._workers import choose_workers
from pardata._world import World, require_world, world

_log = get_logger(__name__)


def make_loader(
    dataset: Dataset[Any],
    batch_size: int,
    *,
    distributed: bool | Literal["auto"] = "auto",
    shuffle: bool = False,
    drop_last: bool | None = None,
    sampler: Sampler[Any] | None = None,
    num_workers: int | Literal["auto"] = "auto",
    seed: int | None = None,
    device: torch.device | str | None = "auto",
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
    left out, so that an evaluation counts each exactly once. Epochs advance by themselves.

    Collective in a world larger than one (unless ``distributed=False``), as is nothing the loader
    does later, save that a `sampler` is compared at the start of an epoch. In a single process it
    is a ``DataLoader`` with epochs.

    Args:
        dataset: map-style: with ``__getitem__`` and ``__len__``.
        batch_size: samples of one optimizer step, over all ranks.
        distributed: ``"auto"`` shares out in a world larger than one; ``True`` insists on a
            launcher; ``False`` gives this process everything.
        shuffle: a new order each epoch, from `seed` and the epoch alone.
        drop_last: of an incomplete last global batch. ``None`` drops it where `shuffle` or a
            `sampler` says that this is training, and keeps it otherwise.
        sampler: yields the order of the whole epoch, the same on every rank, in place of `shuffle`;
            drawn under a seed of its own, with ``set_epoch`` called where it has one.
        num_workers: per rank. ``"auto"``: 0 for a data set that is indexed by whole batches, else
            the cores this rank may use, less one, at most 8.
        seed: of the order and the workers; ``None`` is rank 0's ``torch.initial_seed()``.
        device: where the batches go; ``"auto"`` is the world's, ``None`` leaves them on the CPU.
        collate_fn: as in ``DataLoader``.
        pin_memory: as in ``DataLoader``; ``None`` pins where batches go to a GPU.
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
        _check_dataset(dataset, sampler, shuffle=shuffle)
        length = len(dataset if sampler is None else sampler)  # type: ignore[arg-type]  # checked
        _check_sizes(batch_size, length, here.size, training=training, drop_last=drop_last)
        _check_seed(seed)
        choose_workers(num_workers, dataset, here)
        return {
            "the length": length,
            "batch_size": batch_size,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "seed": seed,
        }

    told = agree(here, "make_loader", facts)
    require_same("make_loader", told, "Pass the same data set and arguments on every rank.")
    if seed is None:
        seed = _seed_of_rank_zero(here)
    if training and batch_size % here.size:
        _log.warning(
            "`batch_size` %d leaves %d ranks shares that differ by one sample, while DDP takes the "
            "plain mean of their gradients: scale the loss to the global batch, or choose a "
            "multiple of %d",
            batch_size,
            here.size,
            here.size,
            ranks=[0],
            once=True,
        )
    workers = choose_workers(num_workers, dataset, here)
    if num_workers == "auto" and workers == 0:
        # DataLoader refuses these without workers, and "auto" may find none on some ranks only.
        multiprocessing_context = prefetch_factor = persistent_workers = None
    target = here.device if device == "auto" else None if device is None else torch.device(device)
    if pin_memory is None:
        pin_memory = target is not None and target.type == "cuda"
    length = len(dataset if sampler is None else sampler)  # type: ignore[arg-type]  # checked
    order = Order(here, length, seed, shuffle, sampler)
    shares = ShareSampler(Plan(length, batch_size, drop_last, here.rank, here.size), order)
    loader: DataLoader[Any] = DataLoader(
        Reader(dataset, world().rank),  # that of the process, also where nothing is shared out
        batch_sampler=shares,
        num_workers=workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory,
        timeout=timeout,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=multiprocessing_context,
        generator=torch.Generator(),
        prefetch_factor=prefetch_factor,
        persistent_workers=workers > 0 if persistent_workers is None else persistent_workers,
    )
    return Loader(loader, shares, dataset, target)


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


def _check_dataset(dataset: object, sampler: object, *, shuffle: bool) -> None:
    if isinstance(dataset, IterableDataset) and (shuffle or sampler is not None):
        msg = (
            f"`shuffle` and `sampler` must be left out for an IterableDataset, whose order is its "
            f"own, but are given for {type(dataset).__name__}: shuffle inside the data set"
        )
        raise ValueError(msg)
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        msg = (
            f"`dataset` must have __getitem__ and __len__, but {type(dataset).__name__} has not: "
            f"write a map-style data set, whose samples have numbers that can be shared out"
        )
        raise TypeError(msg)
    if isinstance(sampler, DistributedSampler):
        msg = (
            "`sampler` must yield the order of the whole data set, but is a DistributedSampler, "
            "which yields one rank's part: leave it out and pass shuffle=True"
        )
        raise ValueError(msg)
    if sampler is not None and not hasattr(sampler, "__len__"):
        msg = (
            f"`sampler` must have a length, but {type(sampler).__name__} has none: give it __len__"
        )
        raise TypeError(msg)
    if sampler is not None and shuffle:
        msg = (
            "`shuffle` must be False with a `sampler`, which is the order, but is True: choose one"
        )
        raise ValueError(msg)


def _check_sizes(
    batch_size: object, length: int, size: int, *, training: bool, drop_last: bool
) -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int):
        msg = f"`batch_size` must be an integer, but is {batch_size!r}"
        raise TypeError(msg)
    if batch_size < max(1, size):
        cure = "it counts the samples of all ranks together" if size > 1 else "pass 1 or more"
        msg = (
            f"`batch_size` must be at least {max(1, size)}, one a rank, but is {batch_size}: {cure}"
        )
        raise ValueError(msg)
    if drop_last and batch_size > length:
        msg = (
            f"`batch_size` must be at most the {length} samples of the data set, as drop_last "
            f"would leave no batch, but is {batch_size}: make it smaller, or pass drop_last=False"
        )
        raise ValueError(msg)
    if training and not drop_last and 0 < length % batch_size < size:
        msg = (
            f"the last batch must have a sample for each of the {size} ranks, but has "
            f"{length % batch_size} of {length}: a rank without one would leave the others "
            f"waiting for its gradient; pass drop_last=True or another batch_size"
        )
        raise ValueError(msg)


def _check_seed(seed: object) -> None:
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        msg = f"`seed` must be an integer or None, but is {seed!r}"
        raise TypeError(msg)
