"""Checks the arguments of make_loader, resolves defaults, and compares both between the ranks."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from pardata._pytree import content_hash
from pardata._validation import check_bool, check_int, check_map_style, vector_of
from pardata.data._batch import uneven_shares
from pardata.data._held_objects import held_mixtures, listed_samples
from pardata.data._mixture import Mixture
from pardata.data._plan import Plan, local_range
from pardata.data._sampler import length_of
from pardata.data._step_source import DataLoaderOptions, check_files, worker_options
from pardata.environment import _world as env
from pardata.environment._device import checked_device
from pardata.environment._logger import get_logger
from pardata.rng._seeds import default_seed, loader_counts
from pardata.store._rank_errors import type_and_message
from pardata.store._round import exchange, raise_if_different

_log = get_logger(__name__)

_FLAGS = ("shuffle", "sharded", "reproducible")
_COMPARED = ("batch_size", "microbatch_size", *_FLAGS, "drop_last", "seed", "prefetch")


@dataclass(frozen=True)
class LoaderConfig:
    """The arguments of `make_loader`."""

    dataset: Any
    batch_size: int | None
    distributed: bool | Literal["auto"]
    shuffle: bool
    drop_last: bool | None
    microbatch_size: int | None
    sampler: Any
    batch_sampler: Iterable[Sequence[Any]] | None
    cost: Iterable[Any] | Callable[[int], float] | None
    sharded: bool
    num_workers: int | Literal["auto"]
    seed: int | None
    reproducible: bool
    device: torch.device | str | None
    batch_transform: Callable[[Any], Any] | None
    prefetch: int
    collate_fn: Callable[[list[Any]], Any] | None
    options: DataLoaderOptions

    @property
    def trains(self) -> bool:
        """Whether the order is that of a training: shuffled, by a `sampler`, or of a `Mixture`."""
        return bool(self.shuffle) or self.sampler is not None or isinstance(self.dataset, Mixture)


@dataclass(frozen=True)
class ResolvedConfig:
    """The arguments with all defaults resolved, on this rank.

    Attributes:
        world: the world of this process, also with ``distributed=False``.
        ranks: the world that shares each global batch; of one rank with ``distributed=False``.
        pins: whether pardata pins the batches, and not ``DataLoader``.
        listed: a hash of the samples that the dataset lists, "nothing" if it lists none.
        initial: PyTorch's initial seed on rank 0, if the seed is made of it.
    """

    given: LoaderConfig
    world: env.World
    ranks: env.World
    plan: Plan
    device: torch.device
    workers: dict[str, Any]
    pins: bool
    seed: int
    listed: str
    initial: int | None = None


def resolve(given: LoaderConfig) -> ResolvedConfig:
    """Return the resolved arguments, after the ranks have compared them.

    Collective, unless `distributed` is False.

    Raises:
        TypeError, ValueError, RuntimeError: an argument is wrong, or ranks disagree.
    """
    shared = given.distributed is not False
    world = _world_for(given.distributed) if shared else env.current_world()
    ranks = world if shared else env.single_world()
    made: list[ResolvedConfig] = []

    def facts() -> dict[str, object]:
        made.append(_resolved(given, world, ranks))
        plan, initial = made[0].plan, torch.initial_seed()
        numbered = initial, loader_counts[initial]
        compared = {"the length": plan.length, **{name: getattr(given, name) for name in _COMPARED}}
        compared["the listed samples"] = made[0].listed
        compared["cost"] = None if plan.costs is None else content_hash([plan.costs])
        return {**compared, "drop_last": plan.drop_last, "numbered": numbered}

    def decide(facts_of_ranks: list[dict[str, Any]]) -> list[int]:
        numbered: list[list[int]] = [each.pop("numbered") for each in facts_of_ranks]  # may differ
        cure = "Pass the same data and arguments on every rank. Sort files and sets, seed splits."
        raise_if_different("make_loader", facts_of_ranks, cure)
        return numbered[0]

    initial, number = exchange(env.store_client(ranks), "make_loader", facts, decide)
    settings = made[0]
    _warn_of_idle_ranks(settings)
    if given.seed is not None:
        return settings
    # On every rank, also on one that has made loaders of its own: all count as rank 0 does.
    loader_counts[torch.initial_seed()] = number + 1
    return replace(settings, seed=default_seed(initial, number), initial=initial)


def _world_for(distributed: object) -> env.World:
    """Return the world that shares each global batch; raise if `distributed` does not fit."""
    if distributed is not True and distributed != "auto":
        raise ValueError(f"`distributed` must be True, False or 'auto', but is {distributed!r}")
    world = env.require_world("make_loader")
    if distributed is True and (world.backend is None or world.launcher == "single"):
        msg = "`distributed` must be 'auto' or False without a launcher, but is True: use torchrun"
        raise RuntimeError(msg)
    return world


def _resolved(given: LoaderConfig, world: env.World, ranks: env.World) -> ResolvedConfig:
    """Return the resolved arguments except for a default seed; raise if one is wrong."""
    if unknown := given.options.keys() - DataLoaderOptions.__annotations__.keys():
        raise TypeError(f"make_loader() got an unexpected keyword argument {min(unknown)!r}")
    if given.batch_sampler is not None:
        _check_batch_sampler(given)
    drop_last = bool(given.shuffle) if given.drop_last is None else given.drop_last
    check_bool("drop_last", drop_last)
    for name in _FLAGS:
        check_bool(name, getattr(given, name))
    _check_data(given)
    plan = replace(_plan(given, ranks, drop_last=drop_last), costs=_costs(given))
    seed = 0 if given.seed is None else given.seed
    check_int("seed", seed)
    check_int("prefetch", given.prefetch, least=0)
    for name in ("collate_fn", "batch_transform"):
        function = getattr(given, name)
        if function is not None and not callable(function):
            raise TypeError(f"`{name}` must be a function, but is {function!r}")
    asked = "cpu" if given.device is None else given.device
    device = world.device if asked == "auto" else checked_device(asked)
    workers, pins = worker_options(given.num_workers, given.options, given.dataset, world, device)
    reads_all = isinstance(given.dataset, IterableDataset) and not given.sharded
    if reads_all and workers["num_workers"] > 1:
        workers["num_workers"] = 1
        text = "one worker reads %s, because each would read all of it, without sharded=True"
        _log.info(text, type(given.dataset).__name__, once=True)
    # `DataLoader` checks its options here, inside the round, so that every rank gets the error.
    check_files(DataLoader(given.dataset, **workers), given.dataset, given.collate_fn)
    listed = listed_samples(given.dataset) or "nothing"
    return ResolvedConfig(given, world, ranks, plan, device, workers, pins, seed, listed)


def _check_batch_sampler(given: LoaderConfig) -> None:
    """Raise if a `batch_sampler` comes with an argument that it replaces."""
    others = {"batch_size": None, "shuffle": False, "sampler": None, "drop_last": None}
    extra = [f"`{name}`" for name, unset in others.items() if getattr(given, name) is not unset]
    if extra:
        msg = f"`batch_sampler` must come alone, but comes with {' and '.join(extra)}: drop those"
        raise ValueError(msg)


def _check_data(given: LoaderConfig) -> None:
    """Raise if the dataset cannot be read, or not in the given order."""
    dataset, kind = given.dataset, type(given.dataset).__name__
    if isinstance(dataset, IterableDataset):
        if given.trains or given.batch_sampler is not None:
            msg = f"an IterableDataset must come without `shuffle` and samplers: shuffle in {kind}"
            raise ValueError(msg)
        if given.cost is not None:
            msg = (
                "`cost` must be None for an IterableDataset, whose samples have no indices: drop it"
            )
            raise ValueError(msg)
        return
    if given.sharded:
        raise ValueError(f"`sharded` must be False for data with indices, as {kind}: leave it out")
    check_map_style(dataset, ", or be an IterableDataset")
    sampler, name = given.sampler, type(given.sampler).__name__
    if isinstance(sampler, DistributedSampler):
        raise ValueError("`sampler` must not be a DistributedSampler: pass shuffle=True instead")
    if isinstance(sampler, BatchSampler):
        raise ValueError(f"`sampler` must not be a {name}: pass it as `batch_sampler` instead")
    if given.shuffle and isinstance(dataset, Mixture):
        raise ValueError("`shuffle` must be False with a Mixture, which shuffles: leave it out")
    if given.shuffle and sampler is not None:
        raise ValueError("`shuffle` must be False with a `sampler`, but is True: choose one")


def _costs(given: LoaderConfig) -> torch.Tensor | None:
    """Return the cost of each sample of the dataset, or None without a `cost`."""
    dataset, cost = given.dataset, given.cost
    if cost is None:
        return None
    if any(mixture is not dataset for mixture in held_mixtures(dataset)):
        msg = "`cost` must be None for a dataset that holds a Mixture, whose samples change places"
        raise ValueError(f"{msg}: pass the Mixture, of such datasets, or leave it out")
    length = sum(map(len, dataset.datasets)) if isinstance(dataset, Mixture) else len(dataset)
    try:
        costs = [cost(index) for index in range(length)] if callable(cost) else cost
    except Exception as error:  # user code may raise anything
        raise RuntimeError(f"`cost` failed: {type_and_message(error)}") from error
    return vector_of("cost", costs, length).clone()  # the user may change it


def _plan(given: LoaderConfig, ranks: env.World, *, drop_last: bool) -> Plan:
    """Return the plan; raise if the batch size does not fit the world or the dataset."""
    batch_size, microbatch_size = given.batch_size, given.microbatch_size
    is_stream = isinstance(given.dataset, IterableDataset)
    length = length_of(given.dataset) if is_stream else len(given.dataset)
    length = None if given.sharded else length  # the length is not that of a rank's part
    plan = Plan(length, batch_size or 0, drop_last, microbatch_size, ranks.rank, ranks.size)
    if microbatch_size is not None:
        check_int("microbatch_size", microbatch_size, least=1)
    if given.batch_sampler is not None:
        return plan
    least = ranks.size if microbatch_size is None else 1
    if batch_size is None:
        what = "the number of samples of one optimizer step, over all processes"
        raise TypeError(f"`batch_size` is missing: pass {what}")
    why = ", one for each rank, as it counts the samples of all ranks together" if least > 1 else ""
    check_int("batch_size", batch_size, least=least, why=why)
    if microbatch_size is not None and microbatch_size > batch_size:
        msg = f"`microbatch_size` must be at most `batch_size` {batch_size}, not {microbatch_size}"
        raise ValueError(msg)
    if microbatch_size is not None and given.sharded:
        msg = f"`microbatch_size` must be None with `sharded`, but is {microbatch_size}: drop one"
        raise ValueError(msg)
    length = plan.length if given.sampler is None else length_of(given.sampler)
    if length is not None:
        replace(plan, length=length).check(shuffled=given.shuffle)
    return plan


def _warn_of_idle_ranks(settings: ResolvedConfig) -> None:
    """Warn of an empty dataset and of idle ranks; note if local batches have unequal sizes."""
    given, plan = settings.given, settings.plan
    batch_size, ranks = given.batch_size, plan.size
    if plan.length == 0:
        text = "the %s is empty, so that its loader has no steps: look at where it reads from"
        _log.warning(text, type(given.dataset).__name__, ranks=[0])
    if batch_size is None:
        return  # a batch_sampler decides it
    # The number of microbatches in a step, or of samples without `microbatch_size`.
    count = -(-batch_size // (given.microbatch_size or 1))
    is_uneven = batch_size % ranks or (ranks > 1 and plan.costs is not None)
    if count < ranks:
        idle = ", ".join(str(rank) for rank in range(ranks) if not local_range(count, rank, ranks))
        text = f"`microbatch_size` {given.microbatch_size} leaves rank(s) {idle} idle: lower it"
        _log.warning(text, ranks=[0], once=True)
    elif given.microbatch_size is None and given.trains and is_uneven:
        uneven_shares.batch_size = batch_size
