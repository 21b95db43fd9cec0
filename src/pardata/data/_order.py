"""In which order an epoch goes through the data set, and what each rank asks for of it."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Sampler

from pardata.collective._agreement import require_same, same
from pardata.data._plan import Plan, Step
from pardata.data._shuffle import Shuffle
from pardata.ranks._world import World
from pardata.seeds._generators import forked_seed
from pardata.seeds._mix import mix

Indices: TypeAlias = "Tensor | Sequence[Any]"
"""The numbers of samples; a sampler may yield those of any kind."""

LookUp: TypeAlias = Callable[[list[range]], Iterable[Indices]]
"""From runs of positions to the indices of the samples there."""

_AHEAD = 2**14  # positions that are looked up together: what costs is the call


@dataclass(eq=False)
class Order:
    """In which order an epoch goes through the data set.

    Attributes:
        ranks: those that must go through it in the same; None where there is one alone.
    """

    ranks: World | None
    length: int
    seed: int
    shuffle: bool
    sampler: Sampler[Any] | None
    _looks_twice: bool = field(default=True, init=False)  # at its first epoch

    def of_epoch(self, epoch: int) -> LookUp:
        """Return what looks up runs of positions of this epoch.

        With a sampler this is collective: it may be of the user's making, so the ranks compare.
        """
        if self.sampler is not None:
            drawn = self._drawn(self.sampler, epoch)
            return lambda runs: [[drawn[position] for position in run] for run in runs]
        if self.shuffle:
            return _each(Shuffle(self.length, mix(self.seed, epoch)).at)
        return _each(lambda positions: positions)

    def fingerprint(self, epoch: int, delivered: int) -> str:
        """Return a hash of the indices at the first `delivered` positions of this epoch."""
        look_up, digest = self.of_epoch(epoch), hashlib.sha256(f"{self.length}:".encode())
        for start in range(0, delivered, _AHEAD):
            (indices,) = look_up([range(start, min(start + _AHEAD, delivered))])
            digest.update("".join(f"{index}," for index in as_list(indices)).encode())
        return digest.hexdigest()

    def _drawn(self, sampler: Sampler[Any], epoch: int) -> list[Any]:
        def draw() -> dict[str, object]:
            indices.extend(self._drawn_once(sampler, epoch))
            if self._looks_twice and repr(self._drawn_once(sampler, epoch)) != repr(indices):
                raise ValueError(
                    f"`sampler` must yield the same order whenever it is asked for that of an "
                    f"epoch, or no run could go on where it was, but {type(sampler).__name__} "
                    f"yielded another for epoch {epoch} when asked again: let it draw from "
                    f"the default generators, which are seeded for it, and not from one of "
                    f"its own (generator=None), and count no epochs but by set_epoch"
                )
            self._looks_twice = False
            return {"the order": hashlib.sha256(repr(indices).encode()).hexdigest()[:16]}

        indices: list[Any] = []
        if self.ranks is None:
            draw()
        else:
            same(self.ranks, "iter(loader) with a sampler", draw, _refuse_orders)
        return indices

    def _drawn_once(self, sampler: Sampler[Any], epoch: int) -> list[Any]:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with forked_seed(mix(self.seed, epoch)):
            indices = list(islice(sampler, self.length + 1))  # it may never end
        if len(indices) != self.length:
            yielded = len(indices) if len(indices) < self.length else "more"
            raise ValueError(
                f"`sampler` must yield as many indices as its length, {self.length}, but yielded "
                f"{yielded}: let its __iter__ end where its __len__ says"
            )
        return indices


def _refuse_orders(told: list[dict[str, object]]) -> None:
    cure = "Make the sampler of the same arguments on every rank."
    require_same("make_loader(sampler=…)", told, cure)


def _each(stands_at: Callable[[Tensor], Tensor]) -> LookUp:
    def look_up(runs: list[range]) -> Iterable[Indices]:
        if all(one.stop == other.start for one, other in pairwise(runs)):  # one rank's are
            positions = torch.arange(runs[0].start, runs[-1].stop)
        else:
            positions = torch.cat([torch.arange(run.start, run.stop) for run in runs])
        found: tuple[Tensor, ...] = stands_at(positions).split([len(run) for run in runs])
        return found

    return look_up


class Request(NamedTuple):
    """What one rank reads for one step: the indices of each microbatch, or of its whole share."""

    step: Step
    indices: list[Indices]


class Requests(Sampler[Request]):
    """Yields, for each step of an epoch from some step on, what this rank reads."""

    def __init__(self, plan: Plan, order: Order, *, to_workers: bool) -> None:
        self.plan = plan
        self.order = order
        self._to_workers = to_workers
        self.start_at(0, 0)

    def start_at(self, epoch: int, delivered: int) -> None:
        """Let the next ``iter()`` begin after so many samples of this epoch."""
        self._epoch, self._first = epoch, -(-delivered // self.plan.batch_size)

    def __iter__(self) -> Iterator[Request]:
        # The order is drawn here, for the epoch of now, and not at the first step.
        return self._requests(self.order.of_epoch(self._epoch), self._epoch, self._first)

    def _requests(self, look_up: LookUp, epoch: int, first: int) -> Iterator[Request]:
        plan = self.plan
        whole, whole_runs = plan.share_of(plan.batch_size)
        together = max(1, _AHEAD * plan.size // plan.batch_size)
        for start in range(first, len(plan), together):
            steps = []
            for number in range(start, min(start + together, len(plan))):
                positions = plan.positions(number)
                step, runs = whole, whole_runs
                if len(positions) < plan.batch_size:
                    step, runs = plan.share_of(len(positions))
                step = Step(epoch, number, *step[2:])  # _replace takes twice as long
                steps.append((step, [positions[run.start : run.stop] for run in runs]))
            found = iter(look_up([run for _, runs in steps for run in runs]))
            if self._to_workers:
                # A tensor would cross as shared memory: a file and a system call each.
                found = map(as_list, found)
            for step, runs in steps:
                yield Request(step, list(islice(found, len(runs))))


def as_list(indices: Indices) -> Any:
    """Return the indices as a list, where they are a tensor."""
    return indices.tolist() if isinstance(indices, Tensor) else indices
