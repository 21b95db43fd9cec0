"""The sampler of global batches: yields the indices that this rank reads in each step.

Does not read the dataset, and communicates only for a user's sampler, whose order ranks compare.
"""

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Sampler

from pardata.data._batched_read import cpu_default_device
from pardata.data._loader_state import Position
from pardata.data._mixture import Mixture
from pardata.data._plan import Plan, StepInfo
from pardata.data._shuffle import Shuffle
from pardata.environment._world import World, store_client
from pardata.rng._rng_state import fork_rng
from pardata.rng._seeds import mix
from pardata.store._rank_errors import type_and_message
from pardata.store._round import Facts, compare_facts

# Indices of samples. A user's sampler may yield any type.
Indices: TypeAlias = "torch.Tensor | Sequence[Any]"

_MOST = 2**26  # the maximum number of indices of a sampler without a length, which may be infinite
_AHEAD = 2**14  # positions in one call of `indices_at`, because a call is expensive


class EpochOrder(NamedTuple):
    """The order of one epoch.

    Attributes:
        steps: the range of positions of each step: a `Plan`, or one range for each batch of a
            ``batch_sampler``.
        shuffle: the permutation from positions to indices, if shuffled.
        drawn: the indices from a user's sampler, by position.
        digest: a hash of `drawn`.
        to_samples: turns indices of a `Mixture`, its positions, into those of samples.
    """

    steps: Plan | Sequence[range]
    shuffle: Shuffle | None = None
    drawn: Sequence[Any] | None = None
    digest: str | None = None
    to_samples: Callable[[Tensor], Tensor] | None = None

    def indices_at(self, ranges: list[range]) -> Iterable[Indices]:
        """Return the indices at each range of positions: a list, or an int64 tensor (len(run),)."""
        if (drawn := self.drawn) is not None:
            return [list(drawn[one.start : one.stop]) for one in ranges]
        positions = torch.cat([torch.arange(r.start, r.stop, device="cpu") for r in ranges])
        indices = positions if self.shuffle is None else self.shuffle.at(positions)
        return list(indices.split([len(one) for one in ranges]))

    def samples_at(self, ranges: list[range]) -> Iterable[Indices]:
        """Return `indices_at`, but of a mixture the indices of its datasets' samples."""
        indices, convert = self.indices_at(ranges), self.to_samples
        if convert is None:
            return indices
        return [convert(torch.as_tensor(each, device="cpu")) for each in indices]


class FetchRequest(NamedTuple):
    """The indices that a rank reads in a step: a list for each microbatch, or one local list.

    Attributes:
        positions: the positions of the indices, with a user's sampler. A repeated index is then
            seeded by its position.
    """

    step: StepInfo
    indices: list[Indices]
    positions: list[range] | None


@dataclass(eq=False)
class GlobalBatchSampler(Sampler[FetchRequest]):
    """Yields the request of this rank for each step of an epoch, from some step on.

    Positions of an epoch become indices by a permutation, a user's sampler, or not at all.

    Attributes:
        plan: the plan of the steps, unless a ``batch_sampler`` makes them.
        ranks: the world whose ranks must have the same order.
        sampler: the user's ``sampler`` or ``batch_sampler``, or None.
        dataset: the dataset, whose order is its own if it is a `Mixture`.
        to_workers: whether worker processes get the requests.
        epoch: the order of the current epoch.
    """

    plan: Plan
    ranks: World
    seed: int
    shuffle: bool
    sampler: Any
    dataset: Any
    to_workers: bool
    epoch: EpochOrder = field(init=False)
    _looks_twice: bool = field(default=True, init=False)  # until the first epoch

    def seek(self, start: Position) -> None:
        """Let the next ``iter()`` begin at `start`.

        Collective with a user's sampler.

        Raises:
            ValueError: the order differs from the one in which the epoch began.
        """
        epoch, delivered = self._of_epoch(start.epoch), 0
        if isinstance(epoch.steps, Plan):  # another batch size: `start` may be inside a step
            delivered = start.delivered % epoch.steps.batch_size
            steps = replace(epoch.steps, start=delivered)
            steps.check(shuffled=self.shuffle)
            epoch = epoch._replace(steps=steps)
        self._number, self.epoch = start.epoch, epoch
        self._first = bisect_left(epoch.steps, start.delivered, key=lambda step: step.start)
        if self._first:
            delivered = epoch.steps[self._first - 1].stop
        if start.digest not in (None, epoch.digest) or start.delivered != delivered:
            msg = f"epoch {start.epoch} must have the order of `state`: make `{self.name}` as then"
            raise ValueError(msg)

    def __iter__(self) -> Iterator[FetchRequest]:
        plan, steps = self.plan, self.epoch.steps
        together = max(1, _AHEAD * plan.size // (plan.batch_size or _AHEAD))
        for start in range(self._first, len(steps), together):
            requested = []
            positions = [steps[n] for n in range(start, min(start + together, len(steps)))]
            for number, (step, ranges) in enumerate(self._planned(positions), start):
                at = steps[number]
                numbered = StepInfo(self._number, number, *step[2:])  # _replace takes twice as long
                requested.append((numbered, [at[one.start : one.stop] for one in ranges]))
            indices = iter(self.epoch.indices_at([one for _, each in requested for one in each]))
            if self.to_workers:
                # As lists: each tensor would be sent in shared memory, by a file and system calls.
                indices = map(as_list, indices)
            for step, ranges in requested:
                drawn_at = None if self.sampler is None else ranges
                yield FetchRequest(step, list(islice(indices, len(ranges))), drawn_at)

    def _planned(self, steps: list[range]) -> list[tuple[StepInfo, list[range]]]:
        """Return for the positions of each step its `StepInfo`, and the ranges of this rank."""
        plan = self.plan
        if plan.costs is None:
            by_size = {size: plan.local_ranges(size) for size in {*map(len, steps)}}
            return [by_size[len(step)] for step in steps]
        samples = self.epoch.samples_at(steps)
        try:
            costs = [plan.costs[torch.as_tensor(each, device="cpu")].tolist() for each in samples]
        except (IndexError, TypeError, ValueError) as error:
            msg = f"`{self.name}` must yield indices below {len(plan.costs)}, of which each has a "
            raise ValueError(f"{msg}`cost`, but: {error}. Leave it out") from error
        return [plan.local_ranges(len(each), costs=each) for each in costs]

    def fingerprint(self, epoch: int, delivered: int) -> str:
        """Return a hash of the indices at the first `delivered` positions of this epoch."""
        # The current epoch's order is kept, because the sampler may have changed since.
        order = self.epoch if getattr(self, "_number", -1) == epoch else self._of_epoch(epoch)
        length = self.plan.length if order.drawn is None else len(order.drawn)
        digest = hashlib.sha256(f"{length}:".encode())
        for start in range(0, delivered, _AHEAD):
            (indices,) = order.samples_at([range(start, min(start + _AHEAD, delivered))])
            digest.update("".join(f"{index}," for index in as_list(indices)).encode())
        return digest.hexdigest()

    @property
    def name(self) -> str:
        """The name of the argument: "sampler" or "batch_sampler"."""
        return "sampler" if self.plan.batch_size else "batch_sampler"

    def _of_epoch(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch. Collective with a user's sampler.

        The ranks compare the order, because a user's sampler may differ between them.
        """
        key, convert = mix(self.seed, epoch), None
        if isinstance(self.dataset, Mixture):
            convert = partial(self.dataset.indices_at, key=key)
        if self.sampler is None:
            shuffle = Shuffle(self.plan.length or 0, key) if self.shuffle else None
            return EpochOrder(self.plan, shuffle, to_samples=convert)
        drawn, digest = self._agreed_order(epoch)
        if self.plan.batch_size:
            # A sampler's length may differ between epochs.
            plan = replace(self.plan, length=len(drawn))
            plan.check(shuffled=False)
            return EpochOrder(plan, None, drawn, digest, convert)
        ends = accumulate(map(len, drawn), initial=0)
        steps = [range(*pair) for pair in pairwise(ends)]
        return EpochOrder(steps, None, list(chain.from_iterable(drawn)), digest, convert)

    def _agreed_order(self, epoch: int) -> tuple[Sequence[Any], str]:
        """Return the sampler's order for this epoch, compared between the ranks, and its hash."""
        found: list[tuple[Sequence[Any], str]] = []

        def draw() -> Facts:
            drawn = self._draw_order(epoch)
            digest = _digest(drawn)
            # Not with PyTorch's samplers without a generator: they draw from the default ones, and
            # take long.
            looks = self._looks_twice and getattr(self.sampler, "generator", self) is not None
            if looks and _digest(self._draw_order(epoch)) != digest:
                msg = f"`{self.name}` must yield the same order each time in epoch {epoch}, but did"
                msg += " not: shuffle a copy, count epochs by set_epoch, and pass generator=None"
                raise ValueError(msg)
            self._looks_twice = False
            found.append((drawn, digest))
            return {"the order": digest}

        cure = "Make the sampler of the same arguments on every rank."
        compare_facts(store_client(self.ranks), f"make_loader({self.name}=…)", draw, cure)
        return found[0]

    def _draw_order(self, epoch: int) -> Sequence[Any]:
        try:
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            length = length_of(self.sampler)
            most = _MOST if length is None else length
            with fork_rng(mix(self.seed, epoch)), cpu_default_device():
                drawn = list(islice(self.sampler, most + 1))
        except Exception as error:  # user code may raise anything
            what = f"`{self.name}` failed in epoch {epoch} on rank {self.ranks.rank}"
            raise RuntimeError(f"{what}: {type_and_message(error)}") from error
        if len(drawn) > most or length not in (None, len(drawn)):
            yielded = len(drawn) if len(drawn) <= most else "more"
            many = f"at most {most} without one" if length is None else most
            msg = f"`{self.name}` must yield as many indices as its length, {many}, not {yielded}"
            raise ValueError(msg)
        if not self.plan.batch_size:
            return [self._checked(batch) for batch in drawn]
        with suppress(TypeError, OverflowError):  # indices may have another type
            return array("q", drawn)  # a fifth of the memory of a list
        return drawn

    def _checked(self, batch: Any) -> list[Any]:
        """Return a batch of a ``batch_sampler`` as a list."""
        batch = batch.tolist() if hasattr(batch, "tolist") else batch
        if not isinstance(batch, list | tuple):
            raise TypeError(f"`batch_sampler` must yield lists, not {batch!r}: pass a `sampler`")
        least = 1 if self.plan.microbatch_size else self.plan.size
        if len(batch) < least:
            msg = f"`batch_sampler` must yield {least} or more indices, but yielded {batch!r}"
            raise ValueError(msg)
        return list(batch)


def _digest(drawn: Sequence[Any]) -> str:
    data: Any = drawn if isinstance(drawn, array) else repr(drawn).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def length_of(sampler: Any) -> int | None:
    """Return the length of a sampler, or None if it has none."""
    with suppress(TypeError, NotImplementedError, AttributeError):
        return len(sampler)
    return None


def as_list(indices: Indices) -> Any:
    """Return indices as a list if they are a tensor."""
    return indices.tolist() if isinstance(indices, torch.Tensor) else indices
