"""What make_loader is given: one value, that is checked once, and then says all there is to say."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from pardata.data._workers import choose_workers
from pardata.ranks._arguments import check_flag, check_integer, check_no_class, checked_device
from pardata.ranks._world import World, require_world, world


@dataclass(frozen=True)
class Arguments:
    """The arguments of `make_loader`, by their names, and what is found out when they are checked.

    What is "auto" or None until it is found out has the type `Any`.

    Attributes:
        here: this process, also where nothing is shared out.
        length: samples of an epoch; None where only its end tells.
    """

    dataset: Any
    batch_size: int
    distributed: bool | Literal["auto"]
    shuffle: bool
    drop_last: Any
    microbatch_size: int | None
    sampler: Any
    sharded: bool
    num_workers: Any
    seed: Any
    reproducible: bool
    device: Any
    batch_transform: Callable[[Any], Any] | None
    prefetch: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool | None
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    prefetch_factor: int | None
    persistent_workers: bool | None
    here: World
    length: Any = None

    @property
    def is_shared(self) -> bool:
        """Whether each global batch is shared out to the ranks of the world."""
        return self.distributed is not False

    @property
    def size(self) -> int:
        """How many ranks share each global batch."""
        return self.here.size if self.is_shared else 1

    @property
    def rank(self) -> int:
        """The number of this process among those."""
        return self.here.rank if self.is_shared else 0

    @property
    def trains(self) -> bool:
        """Whether the order says that this is training."""
        return self.shuffle or self.sampler is not None

    def of_workers(self) -> dict[str, Any]:
        """Return what a ``DataLoader`` is to be told of its workers."""
        names = ("num_workers", "timeout", "worker_init_fn", "multiprocessing_context")
        return {
            name: getattr(self, name) for name in (*names, "prefetch_factor", "persistent_workers")
        }

    def compared(self) -> dict[str, object]:
        """Return what must be the same on every rank."""
        names = ("batch_size", "microbatch_size", "shuffle", "drop_last", "sharded")
        return {
            "the length": self.length,
            **{name: getattr(self, name) for name in (*names, "reproducible", "seed")},
        }


def given(**arguments: Any) -> Arguments:
    """Return the arguments, in the world that they are for.

    Raises:
        ValueError, RuntimeError: where `distributed` is none of its values, or there is no world.
    """
    distributed = arguments["distributed"]
    if distributed is False:
        return Arguments(**arguments, here=world())
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
    return Arguments(**arguments, here=here)


def checked(args: Arguments) -> Arguments:
    """Return the arguments with nothing left open but the seed; raise where one is wrong."""
    args = replace(args, drop_last=args.trains if args.drop_last is None else args.drop_last)
    for name in ("shuffle", "drop_last", "sharded", "reproducible"):
        check_flag(name, getattr(args, name))
    for error in _wrong_data(args):
        raise error
    args = replace(args, length=_length_of(args))
    for error in _wrong_sizes(args):
        raise error
    if args.seed is not None:
        check_integer("seed", args.seed)
    check_integer("prefetch", args.prefetch, least=0)
    for name in ("collate_fn", "batch_transform", "worker_init_fn"):
        function = getattr(args, name)
        if function is not None and not callable(function):
            msg = f"`{name}` must be a function, but is {function!r}"
            raise TypeError(msg)
    args = _with_workers(replace(args, device=_device_of(args)))
    DataLoader(args.dataset, **args.of_workers())  # refuses what it does while other ranks listen
    return args


def _device_of(args: Arguments) -> torch.device | None:
    if args.device == "auto":
        return args.here.device
    return None if args.device is None else checked_device(args.device)


def _with_workers(args: Arguments) -> Arguments:
    """Return the arguments with the number of workers, and what goes with that."""
    workers = choose_workers(args.num_workers, args.dataset, args.here)
    _check_timeout(args.timeout, args.num_workers)
    persist = workers > 0 if args.persistent_workers is None else args.persistent_workers
    found = replace(args, num_workers=workers, persistent_workers=persist)
    if workers or args.num_workers != "auto":
        return found
    # DataLoader refuses these without workers, and "auto" may find none on some ranks only.
    none: dict[str, Any] = {"multiprocessing_context": None, "prefetch_factor": None}
    return replace(found, timeout=0, persistent_workers=False, **none)


def _wrong_data(args: Arguments) -> Iterator[Exception]:
    """Yield why the data set cannot be read, or not in the order that is asked for."""
    kind = type(args.dataset).__name__
    if isinstance(args.dataset, IterableDataset):
        if args.trains:
            yield ValueError(
                f"`shuffle` and `sampler` must be left out for an IterableDataset, whose order is "
                f"its own, but are given for {kind}: shuffle inside the data set"
            )
        return
    if args.sharded:
        yield ValueError(
            f"`sharded` must be False for a data set that has indices, which are shared out here, "
            f"but is True for {kind}: leave it out"
        )
    check_no_class(args.dataset)
    if not (hasattr(args.dataset, "__getitem__") and hasattr(args.dataset, "__len__")):
        yield TypeError(
            f"`dataset` must have __getitem__ and __len__, or be an IterableDataset, but {kind} is "
            f"neither: write a map-style data set, whose samples have numbers that can be shared "
            f"out"
        )
    sampler = args.sampler
    if isinstance(sampler, DistributedSampler):
        yield ValueError(
            "`sampler` must yield the order of the whole data set, but is a DistributedSampler, "
            "which yields one rank's part: leave it out and pass shuffle=True"
        )
    if sampler is not None and not hasattr(sampler, "__len__"):
        name = type(sampler).__name__
        yield TypeError(f"`sampler` must have a length, but {name} has none: give it __len__")
    if sampler is not None and args.shuffle:
        yield ValueError(
            "`shuffle` must be False with a `sampler`, which is the order, but is True: choose one"
        )


def _length_of(args: Arguments) -> int | None:
    if args.sharded:
        return None  # what a rank's part says of itself is not the length of the whole
    name = "dataset" if args.sampler is None else "sampler"
    measured = getattr(args, name)
    try:
        return len(measured)
    except (TypeError, NotImplementedError) as error:
        if isinstance(error, TypeError) and isinstance(args.dataset, IterableDataset):
            return None  # it may have none
        msg = (
            f"`{name}` must know its length, but len() of {type(measured).__name__} failed: "
            f"{error}: let its __len__ return a whole number"
        )
        raise TypeError(msg) from error


def _wrong_sizes(args: Arguments) -> Iterator[Exception]:
    """Yield why the batch size does not go with the world or the data set."""
    batch_size, microbatch_size, length = args.batch_size, args.microbatch_size, args.length
    least = args.size if microbatch_size is None else 1
    why = ", one a rank, as it counts the samples of all ranks together" if least > 1 else ""
    check_integer("batch_size", batch_size, least=least, why=why)
    if microbatch_size is not None:
        check_integer("microbatch_size", microbatch_size, least=1)
        if microbatch_size > batch_size:
            yield ValueError(
                f"`microbatch_size` must be at most the `batch_size` of {batch_size}, of which it "
                f"is a piece, but is {microbatch_size}: make it smaller"
            )
        if args.sharded:
            yield ValueError(
                f"`microbatch_size` must be left out with `sharded`, as the steps of such streams "
                f"depend on the number of ranks, but is {microbatch_size}: choose one"
            )
    if length is not None and args.drop_last and batch_size > length:
        yield ValueError(
            f"`batch_size` must be at most the {length} samples of the data set, as drop_last "
            f"would leave no batch, but is {batch_size}: make it smaller, or pass drop_last=False"
        )
    last = 0 if length is None else length % batch_size
    if args.trains and not args.drop_last and microbatch_size is None and 0 < last < args.size:
        yield ValueError(
            f"the last batch must have a sample for each of the {args.size} ranks, but has {last} "
            f"of {length}: a rank without one would leave the others waiting for its gradient; "
            f"pass drop_last=True, `microbatch_size` or another batch_size"
        )


def _check_timeout(timeout: object, num_workers: object) -> None:
    """Raise where `timeout` is no number, or there is nobody to wait for."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        msg = f"`timeout` must be a number of seconds from 0 up, but is {timeout!r}"
        raise ValueError(msg)
    if timeout and num_workers == 0:
        msg = (
            f"`timeout` must be 0 without workers, for whose batches it waits, but is {timeout!r}: "
            f"leave it out, or pass `num_workers`"
        )
        raise ValueError(msg)
