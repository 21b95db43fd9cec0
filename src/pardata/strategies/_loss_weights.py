"""The weight of each microbatch of this rank in the mean over the global batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata._pytree import content_hash
from pardata.collectives._all_reduce import checked_weight
from pardata.collectives._fingerprint import (
    CheckedCollective,
    fingerprint_slots,
    fingerprints_match,
)
from pardata.data._batch_parts import tensors_of
from pardata.data._microbatches import Microbatches
from pardata.data._sample_count import delivered, samples_of
from pardata.environment._device import widest_float_dtype
from pardata.environment._logger import get_logger
from pardata.environment._world import cpu_group_and_device, world

_log = get_logger(__name__)

Counts = Mapping[str, float]
Count = Callable[[Any], "float | Tensor | Mapping[str, float | Tensor]"]

_SAME_SAMPLES = (
    "all ranks train on the same samples: a plain DataLoader gives each of them the whole dataset, "
    "and so does make_loader with distributed=False. Use make_loader without it."
)
_MOST_TERMS = 32  # in a loss: their counts have places in the header of a collective


class Replicas:
    """Who runs the microbatches of a step together: here only this process.

    Attributes:
        size: how many ranks; `group` is their process group, or None for that of the world.
        least: how many microbatches a rank must run at least.
        equally_many: whether every rank must run as many as the one that has most.
        adds_in_order: whether sums of fractions must not depend on who adds them.
        layer: of the model: the one that its strategy is known by.
    """

    size = 1
    group: Any = None
    least = 0
    equally_many = adds_in_order = False

    def __init__(self, layer: nn.Module) -> None:
        self.layer: Any = layer


class StepCounts:
    """The counts of the microbatches of this rank, and their sums over all ranks.

    Args:
        count: as `backward` gets it.
        held: the microbatches of this rank; `planned` are the samples of each, if a loader knows.
        placeholder: shows a rank without microbatches which terms there are.

    Attributes:
        rows: what each microbatch counts: under "" the number, or its samples where `count` returns
            a dict, and under its names what that holds.
    """

    def __init__(
        self, count: Count, held: Sequence[Any], planned: Sequence[Any], placeholder: Any = None
    ) -> None:
        self._count, self._pairs = count, list(zip(held, planned, strict=True))
        self._placeholder = placeholder
        # As many where `count` fails, which is raised once all ranks know.
        self.rows: list[Counts] = [{"": 0.0}] * len(held)
        self._names = [""]

    def _ask(self) -> dict[tuple[str, ...], float]:
        """Call `count`; return a number for each name, which ranks must have in common."""
        rows = [self._ask_for(data, partial(samples_of, data, read)) for data, read in self._pairs]
        is_shown = rows or self._placeholder is None
        for row in (shown := rows if is_shown else [self._ask_for(self._placeholder, int)]):
            if row.keys() != shown[0].keys() or len(row) > _MOST_TERMS + 1:
                raise ValueError(
                    f"`count` must return the same names for each microbatch, at most "
                    f"{_MOST_TERMS}, but returned {sorted(shown[0])[1:]} and {sorted(row)[1:]}: "
                    f"return 0 for a term that counts nothing"
                )
        if unseen := [row for row in rows if not row[""] and any(row.values())]:
            raise ValueError(
                f"`batch` must have samples where a term counts something, but its first tensor "
                f"has no rows, and `count` returned {dict(unseen[0])}: let a tensor with a row for "
                f"each sample stand first in the batch"
            )
        self.rows = rows
        self._names = sorted(shown[0]) if shown else [""]
        return dict.fromkeys([(name,) for name in self._names], 0)

    def _ask_for(self, microbatch: Any, samples: Callable[[], int]) -> Counts:
        given = self._count(microbatch)
        if not isinstance(given, Mapping):
            return {"": checked_weight(given, "count(microbatch)")}
        if not all(isinstance(name, str) and name for name in given):
            raise TypeError(f"`count` must name terms by texts, but returned the names {[*given]}")
        terms = {n: checked_weight(c, f"count(microbatch)[{n!r}]") for n, c in given.items()}
        return {"": samples(), **terms}

    def start(self, replicas: Replicas, numbers: range, step_size: int) -> Callable[[], Counts]:
        """Begin to add up, and return what waits for the sums over all ranks, by name.

        Args:
            replicas: who adds up.
            numbers: of the microbatches here.
            step_size: how many microbatches all ranks have.
        """
        sums_of = self._started(replicas)

        @cache  # asked for with each microbatch, and waited for once
        def sums() -> Counts:
            fractions, *rest = sums_of()
            totals = rest[: len(self._names)]
            beginnings = [int(number) for number in rest[len(self._names) :]]
            if beginnings and fingerprints_match(beginnings):
                _log.warning(_SAME_SAMPLES, ranks=[0])
            if replicas.adds_in_order and replicas.size > 1 and fractions:
                totals = self._in_order(numbers, step_size)
            positive(totals[0])
            if self._count is samples_of:
                vars(replicas.layer)[_USUAL] = totals[0]
            return dict(zip(self._names, totals, strict=True))

        return sums

    def _started(self, replicas: Replicas) -> Callable[[], Sequence[float]]:
        """Begin to add up over the ranks: how many are no integers, counts, and a hash."""
        is_world = replicas.size > 1 and replicas.size == dist.get_world_size()
        # In the form of every other collective here: a rank that is in another one gets an error.
        matching = CheckedCollective("backward", self._ask, lambda _: "count") if is_world else None
        if matching is None:
            self._ask()
        table = self._table()
        own = [math.fsum(column) for column in zip(*table, strict=True)] or [0.0] * len(self._names)
        own.insert(0, sum(not float(number).is_integer() for row in table for number in row))
        # Without a `count` this is a model's first step: do all ranks have the same samples?
        if self._count is samples_of:
            own += fingerprint_slots(_beginning(self._pairs[0][0], replicas), replicas.size)
        if matching is not None:
            return matching.start(own)
        if replicas.size == 1:
            return lambda: own
        device = next(replicas.layer.parameters()).device
        numbers = torch.tensor(own, dtype=widest_float_dtype(device)).to(device)
        sums = started(numbers, replicas.group)
        return lambda: sums().tolist()

    def _table(self) -> list[list[float]]:
        return [[row.get(name, 0) for name in self._names] for row in self.rows]

    def _in_order(self, numbers: range, step_size: int) -> list[float]:
        """Return sums over the microbatches of all ranks that no order can change. Collective."""
        group, device = cpu_group_and_device(world())
        rows = [[0.0] * len(self._names)] * step_size
        rows[numbers.start : numbers.stop] = self._table()
        table = torch.tensor(rows, dtype=torch.float64, device=device)
        dist.all_reduce(table, group=group)  # each row is of one rank: the others add zeros
        return [math.fsum(column) for column in zip(*table.tolist(), strict=True)]


def _beginning(batch: Any, replicas: Replicas) -> str:
    """Return a hash of the first samples, where it can be made and no loader has shared them out.

    Else a text that no other rank has.
    """
    with suppress(Exception):  # tensors may be of any kind, and this is advice: no rank fails
        known = delivered.get(batch)
        first_rows = [x[:8] for x in tensors_of(batch) if x.ndim]
        if first_rows and (known is None or known.size != replicas.size):
            return content_hash(first_rows)
    return f"of rank {dist.get_rank()}"


def started(numbers: Tensor, group: Any) -> Callable[[], Tensor]:
    """Begin to add up numbers over ranks, and return what waits for the sums, unless on a GPU."""
    work: Any = dist.all_reduce(numbers, group=group, async_op=True)

    def sums() -> Tensor:
        work.wait()
        return numbers

    return sums


def positive(total: float) -> float:
    """Return `total`, unless it is 0."""
    if total == 0:
        raise ValueError("a step must count something, but all its microbatches count 0: skip it")
    return total


_USUAL = "_pardata_usual_count"  # set on the layer of a model that shows its strategy


@dataclass(eq=False)
class Microbatch:
    """A microbatch that this rank runs; a placeholder counts 0 and has no number in the step.

    Attributes:
        counts: what it counts in each term of the loss, where `count` returns a dict.
    """

    data: Any
    count: float
    number: int = -1
    counts: Counts = field(default_factory=dict)


class Share(NamedTuple):
    """The microbatches that this rank runs in a step.

    Attributes:
        microbatches: what is run, in this order.
        most: the microbatches of the rank that has most.
        totals: returns the counts of all ranks by name; see `StepCounts`. Without a plan it goes by
            the model's first such step. It raises, on every rank, if a `count` failed, or all
            counts are 0.
        left_out: whether fewer samples are here than planned.
    """

    microbatches: list[Microbatch]
    most: int
    totals: Callable[[], Counts]
    left_out: bool = False

    def expected(self) -> float:
        """Return what the microbatches of all ranks count, but for the terms of a loss."""
        return self.totals()[""]

    @classmethod
    def of(cls, batch: Any, count: Count | None, replicas: Replicas) -> "Share":
        """Return what `batch` is made of. Communicates if a `count` is given, or nothing."""
        if not isinstance(batch, Microbatches):
            return cls._of_one(batch, count, replicas)
        if replicas.size not in (1, batch.size):
            raise ValueError(
                f"the ranks that train the model, {replicas.size}, must be those that share "
                f"`batch`, but it is shared by {batch.size}: pass distributed='auto' to make_loader"
            )
        held = batch[:]
        planned = [batch.counts[number] for number in batch.numbers]
        if count is None:
            counts = [*map(samples_of, held, planned)]
            totals = _known(sum(counts if replicas.size == 1 else batch.counts))
            own = list(map(Microbatch, held, counts, batch.numbers))
        else:
            counted = StepCounts(count, held, planned, batch.placeholder)
            totals = counted.start(replicas, batch.numbers, len(batch.counts))
            both = zip(held, counted.rows, batch.numbers, strict=True)
            own = [Microbatch(data, row[""], number, row) for data, row, number in both]
        left_out = count is None and [one.count for one in own] != planned
        most = -(-len(batch.counts) // replicas.size)
        wanted = max(replicas.least, most if replicas.equally_many else 0)
        if len(own) < wanted and batch.placeholder is None:
            raise ValueError(
                f"a rank must have a microbatch to run if the others run one, but {batch!r} "
                f"has none: give it a placeholder, any microbatch of the step"
            )
        # First, so that what synchronises is a microbatch of this rank's own, if it has one.
        placeholders = [Microbatch(batch.placeholder, 0) for _ in range(wanted - len(own))]
        return cls(placeholders + own, most, totals, left_out)

    @classmethod
    def _of_one(cls, batch: Any, count: Count | None, replicas: Replicas) -> "Share":
        """Return the share of a rank that runs one batch, which no plan knows."""
        usual: float | None = vars(replicas.layer).get(_USUAL)
        if count is None and (replicas.size == 1 or usual is not None):
            # All ranks take the usual number for the sum, and correct the gradients afterwards.
            own = samples_of(batch)
            known = _known(own if usual is None or replicas.size == 1 else usual)
            return cls([Microbatch(batch, own, 0)], 1, known)
        counted = StepCounts(count or samples_of, [batch], [None])
        totals = counted.start(replicas, range(1), 1)
        one = Microbatch(batch, counted.rows[0][""], 0, counted.rows[0])
        return cls([one], 1, totals)


def _known(total: float) -> Callable[[], Counts]:
    positive(total)
    return lambda: {"": total}
