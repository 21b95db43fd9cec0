"""What make_loader is given: checked once, and found to be the same on every rank."""

from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from pardata.collective._agreement import agree, require_same
from pardata.data._workers import choose_workers
from pardata.ranks._arguments import check_flag, check_integer, check_no_class, checked_device
from pardata.ranks._logger import get_logger
from pardata.ranks._world import World, require_world, world

_log = get_logger(__name__)

_OF_WORKERS = (
    *("num_workers", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers"),
)
_COMPARED = (
    *("batch_size", "microbatch_size", "shuffle", "drop_last", "sharded"),
    *("reproducible", "seed"),
)


class Arguments(NamedTuple):
    """The arguments of `make_loader`, by their names there, and what is found out about them.

    Each is of its type once `agreed` has returned them; before, it is what was given.

    Attributes:
        here: this process, also where nothing is shared out.
        rank: the number of this process among those that share each global batch.
        size: how many those are.
        length: samples of an epoch; None where only its end tells.
    """

    dataset: Any
    batch_size: int
    shuffle: bool
    drop_last: bool
    microbatch_size: int | None
    sampler: Sampler[Any] | None
    sharded: bool
    num_workers: int
    seed: int
    reproducible: bool
    device: torch.device | None
    batch_transform: Callable[[Any], Any] | None
    prefetch: int
    collate_fn: Callable[[list[Any]], Any] | None
    pin_memory: bool | None
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: BaseContext | str | None
    prefetch_factor: int | None
    persistent_workers: bool
    here: World
    rank: int
    size: int
    length: Any = None

    @property
    def trains(self) -> bool:
        """Whether the order says that this is training."""
        return self.shuffle or self.sampler is not None

    @property
    def workers(self) -> dict[str, Any]:
        """What a ``DataLoader`` is to be told of its workers."""
        return {name: getattr(self, name) for name in _OF_WORKERS}


def agreed(distributed: bool | Literal["auto"], **given: Any) -> Arguments:  # noqa: FBT001  # as make_loader has it
    """Return the arguments, checked, and found to be the same on every rank.

    Collective, unless `distributed` is False.

    Raises:
        TypeError, ValueError, RuntimeError: where one is wrong, or ranks disagree.
    """
    shared = distributed is not False
    here = _world_for(distributed) if shared else world()
    rank, size = (here.rank, here.size) if shared else (0, 1)
    args = Arguments(**given, here=here, rank=rank, size=size)

    def facts() -> dict[str, object]:
        nonlocal args
        args = _checked(args)
        compared = {"the length": args.length, **{name: getattr(args, name) for name in _COMPARED}}
        return {**compared, "initial_seed": torch.initial_seed()}

    def decide(told: list[dict[str, Any]]) -> int:
        initial: list[int] = [each.pop("initial_seed") for each in told]  # may differ: rank 0's
        require_same("make_loader", told, "Pass the same data set and arguments on every rank.")
        return initial[0]

    seed = agree(here, "make_loader", facts, decide) if shared else decide([facts()])
    _warn_of_uneven_shares(args)
    return args if given["seed"] is not None else args._replace(seed=seed)


def _world_for(distributed: object) -> World:
    """Return the world that shares each global batch."""
    if distributed is not True and distributed != "auto":
        raise ValueError(f"`distributed` must be True, False or 'auto', but is {distributed!r}")
    here = require_world("make_loader")
    if distributed is True and (here.backend is None or here.launcher == "single"):
        raise RuntimeError(
            "`distributed` must be 'auto' or False without a launcher, but is True: start the "
            "script with torchrun, srun or mpirun and call `pardata.init()` first"
        )
    return here


def _checked(args: Any) -> Arguments:
    """Return the arguments with nothing left open but the seed; raise where one is wrong."""
    if args.drop_last is None:
        args = args._replace(drop_last=args.trains)
    for name in ("shuffle", "drop_last", "sharded", "reproducible"):
        check_flag(name, getattr(args, name))
    for error in _wrong_data(args):
        raise error
    args = args._replace(length=_length_of(args))
    for error in _wrong_sizes(args):
        raise error
    if args.seed is not None:
        check_integer("seed", args.seed)
    check_integer("prefetch", args.prefetch, least=0)
    for name in ("collate_fn", "batch_transform", "worker_init_fn"):
        function = getattr(args, name)
        if function is not None and not callable(function):
            raise TypeError(f"`{name}` must be a function, but is {function!r}")
    if args.device is not None:
        device = args.here.device if args.device == "auto" else checked_device(args.device)
        args = args._replace(device=device)
    checked: Arguments = args._replace(**_workers_of(args))
    DataLoader(checked.dataset, **checked.workers)  # refuses what it does while others listen
    return checked


def _workers_of(args: Any) -> dict[str, Any]:
    """Return how many workers there are, and what goes with that."""
    asked, timeout, persistent = args.num_workers, args.timeout, args.persistent_workers
    number = choose_workers(asked, args.dataset, args.here)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise ValueError(f"`timeout` must be a number of seconds from 0 up, but is {timeout!r}")
    if timeout and asked == 0:
        raise ValueError(
            f"`timeout` must be 0 without workers, for whose batches it waits, but is {timeout!r}: "
            f"leave it out, or pass `num_workers`"
        )
    if number == 0 and asked == "auto":
        # DataLoader refuses these without workers, and "auto" may find none on some ranks only.
        alone = {"timeout": 0, "multiprocessing_context": None, "prefetch_factor": None}
        return {"num_workers": 0, "persistent_workers": False, **alone}
    return {
        "num_workers": number,
        "persistent_workers": number > 0 if persistent is None else persistent,
    }


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
        raise TypeError(
            f"`{name}` must know its length, but len() of {type(measured).__name__} failed: "
            f"{error}: let its __len__ return a whole number"
        ) from error


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


def _warn_of_uneven_shares(args: Arguments) -> None:
    batch_size, size = args.batch_size, args.size
    # Without microbatches a rank gets single samples, at least one.
    pieces = -(-batch_size // (args.microbatch_size or 1))
    if pieces < size:
        text = (
            f"a `batch_size` of {batch_size} in microbatches of {args.microbatch_size} is "
            f"{pieces}, fewer than the {size} ranks: ranks {pieces} to {size - 1} idle; make "
            f"`microbatch_size` smaller"
        )
    elif args.microbatch_size is None and args.trains and batch_size % size:
        text = (
            f"`batch_size` {batch_size} leaves {size} ranks shares that differ by one sample, "
            f"which `pardata.backward` weights, while a loss.backward() of one's own takes the "
            f"plain mean of their gradients: use `pardata.backward`, or choose a multiple of {size}"
        )
    else:
        return
    _log.warning(text, ranks=[0], once=True)
