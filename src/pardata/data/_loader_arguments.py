"""What make_loader is given: checked once, and found to be the same on every rank."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from pardata.collective._agreement import agree, require_same
from pardata.data._order import length_of
from pardata.data._plan import Plan, share
from pardata.data._uneven_shares import uneven_shares
from pardata.data._workers import choose_workers
from pardata.ranks._device import checked_device
from pardata.ranks._logger import get_logger
from pardata.ranks._world import World, require_world, single_world, world
from pardata.seeds._default_seeds import default_seed, next_number
from pardata.values._arguments import check_flag, check_integer, check_map_style

_log = get_logger(__name__)

_COMPARED = (
    *("batch_size", "microbatch_size", "strided", "shuffle", "drop_last", "sharded"),
    *("reproducible", "seed", "prefetch"),
)
_OF_WORKERS = (
    *("num_workers", "timeout", "prefetch_factor", "persistent_workers"),
    *("worker_init_fn", "multiprocessing_context"),
)


class Arguments(SimpleNamespace):
    """The arguments of `make_loader`, by their names there, and what is found out about them.

    Attributes:
        here: this process, also where nothing is shared out.
        ranks: those that share each global batch; where nothing is shared out, this one alone.
        length: samples of the dataset; None if only its end tells.
        initial_seed: of which the default seed was made; None if a seed was given.
        workers: what a ``DataLoader`` is to be told of them.
    """

    @property
    def trains(self) -> bool:
        """Whether the order says that this is training."""
        return bool(self.shuffle) or self.sampler is not None


def agreed(distributed: object, **given: Any) -> Arguments:
    """Return the arguments, checked, and found to be the same on every rank.

    Collective, unless `distributed` is False.

    Raises:
        TypeError, ValueError, RuntimeError: where one is wrong, or ranks disagree.
    """
    shared = distributed is not False
    here = _world_for(distributed) if shared else world()
    args = Arguments(**given, here=here, ranks=here if shared else single_world())

    def facts() -> dict[str, object]:
        _check(args)
        compared = {"the length": args.length, **{name: getattr(args, name) for name in _COMPARED}}
        initial = torch.initial_seed()
        return {**compared, "loaders": [initial, next_number(initial)]}

    def decide(told: list[dict[str, Any]]) -> list[int]:
        counts: list[list[int]] = [each.pop("loaders") for each in told]  # may differ: rank 0's
        require_same("make_loader", told, "Pass the same dataset and arguments on every rank.")
        return counts[0]

    initial, number = agree(args.ranks, "make_loader", facts, decide)
    args.initial_seed, args.number = None, number
    if args.seed is None:
        args.seed, args.initial_seed = default_seed(initial, number), initial
    _look_at_shares(args)
    return args


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


def _check(args: Arguments) -> None:
    """Raise where an argument is wrong, and leave nothing open but the seed."""
    if args.batch_sampler is not None:
        _check_alone(args)
    args.drop_last = args.trains if args.drop_last is None else args.drop_last
    for name in ("strided", "shuffle", "drop_last", "sharded", "reproducible"):
        check_flag(name, getattr(args, name))
    _check_data(args)
    args.length = _length_of(args)
    _check_sizes(args)
    if args.seed is not None:
        check_integer("seed", args.seed)
    check_integer("prefetch", args.prefetch, least=0)
    for name in ("collate_fn", "batch_transform", "worker_init_fn"):
        function = getattr(args, name)
        if function is not None and not callable(function):
            raise TypeError(f"`{name}` must be a function, but is {function!r}")
    asked = "cpu" if args.device is None else args.device
    args.device = args.here.device if asked == "auto" else checked_device(asked)
    _choose_workers(args)
    DataLoader(args.dataset, **args.workers)  # refuses what it does while others listen


def _choose_workers(args: Arguments) -> None:
    """Decide how many workers there are, and what goes with that."""
    asked, timeout = args.num_workers, args.timeout
    args.num_workers = choose_workers(asked, args.dataset, args.here)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise ValueError(f"`timeout` must be a number of seconds from 0 up, but is {timeout!r}")
    if timeout and asked == 0:
        raise ValueError(
            f"`timeout` must be 0 without workers, because it waits for their batches, "
            f"but is {timeout!r}: leave it out, or pass `num_workers`"
        )
    if args.persistent_workers is None:
        args.persistent_workers = args.num_workers > 0
    if args.num_workers == 0 and asked == "auto":
        # DataLoader refuses these without workers, and "auto" may find none on some ranks only.
        args.timeout, args.multiprocessing_context, args.prefetch_factor = 0, None, None
        args.persistent_workers = False
    args.workers = {name: getattr(args, name) for name in _OF_WORKERS}


def _check_alone(args: Arguments) -> None:
    """Raise where a `batch_sampler` comes with what it stands in place of."""
    others = {"batch_size": None, "shuffle": False, "sampler": None, "drop_last": None}
    given = [f"`{name}`" for name, unset in others.items() if getattr(args, name) is not unset]
    if given:
        raise ValueError(
            f"`batch_sampler` must come without {', '.join(given)}, as it yields whole batches in "
            f"their order, but both are given: leave {' and '.join(given)} out"
        )


def _check_data(args: Arguments) -> None:
    """Raise where the dataset cannot be read, or not in the order that is asked for."""
    dataset, kind = args.dataset, type(args.dataset).__name__
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "`dataset` must be what a DataLoader reads from, but is a DataLoader: pass "
            "loader.dataset, and its batch_size times the number of ranks, as that counts the "
            "samples of all ranks here"
        )
    if isinstance(dataset, IterableDataset):
        if args.trains or args.batch_sampler is not None:
            raise ValueError(
                f"`shuffle`, `sampler` and `batch_sampler` must be left out for an "
                f"IterableDataset, whose order is its own, but are given for {kind}: shuffle "
                f"inside the dataset"
            )
        return
    if args.sharded:
        raise ValueError(
            f"`sharded` must be False for a dataset that has indices, which are shared out here, "
            f"but is True for {kind}: leave it out"
        )
    check_map_style(dataset, ", or be an IterableDataset")
    if args.sampler is not None:
        _check_sampler(args)


def _check_sampler(args: Arguments) -> None:
    sampler, name = args.sampler, type(args.sampler).__name__
    if isinstance(sampler, DistributedSampler):
        raise ValueError(
            "`sampler` must yield the order of the whole dataset, but is a DistributedSampler, "
            "which yields one rank's part: leave it out and pass shuffle=True"
        )
    if isinstance(sampler, BatchSampler):
        raise ValueError(
            f"`sampler` must yield single indices, but is a {name}, which yields lists of them: "
            f"pass it as `batch_sampler`, and no `batch_size`"
        )
    if args.shuffle:
        raise ValueError(
            "`shuffle` must be False with a `sampler`, which is the order, but is True: choose one"
        )


def _length_of(args: Arguments) -> int | None:
    if args.sharded:
        return None  # what a rank's part says of itself is not the length of the whole
    try:
        return len(args.dataset)
    except (TypeError, NotImplementedError) as error:
        if isinstance(error, TypeError) and isinstance(args.dataset, IterableDataset):
            return None  # it may have none
        raise TypeError(
            f"`dataset` must know its length, but len() of {type(args.dataset).__name__} failed: "
            f"{error}: let its __len__ return a whole number"
        ) from error


def _check_sizes(args: Arguments) -> None:
    """Raise where the batch size does not go with the world or the dataset."""
    batch_size, microbatch_size = args.batch_size, args.microbatch_size
    whose = args.ranks.rank, args.ranks.size
    sizes = args.length, batch_size or 0, args.drop_last, microbatch_size
    args.plan = Plan(*sizes, *whose, strided=args.strided)
    if microbatch_size is not None:
        check_integer("microbatch_size", microbatch_size, least=1)
    elif args.strided:
        raise ValueError(
            "`strided` must be False without a `microbatch_size`, because it says which "
            "microbatches a rank gets, but is True: pass microbatch_size, or leave it out"
        )
    if args.batch_sampler is not None:
        return
    least = args.ranks.size if microbatch_size is None else 1
    if batch_size is None:
        what = "the number of samples of one optimizer step, over all processes"
        raise TypeError(f"`batch_size` is missing: pass {what}")
    why = ", one for each rank, as it counts the samples of all ranks together" if least > 1 else ""
    check_integer("batch_size", batch_size, least=least, why=why)
    if microbatch_size is not None:
        if microbatch_size > batch_size:
            raise ValueError(
                f"`microbatch_size` must be at most the `batch_size` of {batch_size}, but "
                f"is {microbatch_size}: make it smaller"
            )
        if args.sharded:
            raise ValueError(
                f"`microbatch_size` must be left out with `sharded`, as the steps of such data "
                f"depend on the number of ranks, but is {microbatch_size}: choose one"
            )
    length = args.length if args.sampler is None else length_of(args.sampler)
    if length is not None:
        replace(args.plan, length=length).check(trains=args.trains)


def _look_at_shares(args: Arguments) -> None:
    """Say if nothing is read, or ranks idle; note for training steps that shares are uneven."""
    batch_size, ranks = args.batch_size, args.ranks.size
    if args.length == 0:
        text = "the %s is empty, so that its loader has no steps: look at where it reads from"
        _log.warning(text, type(args.dataset).__name__, ranks=[0])
    if batch_size is None:
        return  # only the batch_sampler knows
    # Without microbatches a rank gets single samples, at least one.
    pieces = -(-batch_size // (args.microbatch_size or 1))
    if pieces < ranks:
        shares = [share(pieces, rank, ranks, strided=args.strided) for rank in range(ranks)]
        idle = ", ".join(str(rank) for rank, own in enumerate(shares) if not own)
        text = (
            f"a `batch_size` of {batch_size} makes {pieces} microbatches of at most "
            f"{args.microbatch_size} samples for {ranks} ranks, so that rank(s) {idle} have "
            f"nothing to do; make `microbatch_size` smaller"
        )
        _log.warning(text, ranks=[0], once=True)
    elif args.microbatch_size is None and args.trains and batch_size % ranks:
        uneven_shares.batch_size = batch_size
