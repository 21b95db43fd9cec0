"""The weights of this rank's microbatches in the mean loss over the global batch.

Does not weight gradients itself: `Step.backward` multiplies each loss.
"""

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
from pardata.data._batch import delivered, iter_tensors, num_samples
from pardata.data._microbatches import Microbatches
from pardata.environment._device import widest_float_dtype
from pardata.environment._logger import get_logger
from pardata.environment._world import cpu_group_and_device, world
from pardata.strategies._step_record import record_of

_log = get_logger(__name__)

Counts = Mapping[str, float]
Count = Callable[[Any], "float | Tensor | Mapping[str, float | Tensor]"]

_SAME_SAMPLES = (
    "all ranks train on the same samples, as a plain DataLoader gives them: use make_loader, "
    "without distributed=False"
)
_MOST_TERMS = 32  # terms of a loss, whose counts fit in the header of a collective


class Replicas:
    """The ranks that run a step together; in this base class only this process.

    Attributes:
        size: number of ranks; `group` is their process group, None for the default one.
        min_microbatches: minimum number of microbatches that a rank must run.
        equal_microbatches: whether every rank must run as many microbatches as the rank with most.
        has_ordered_sums: whether sums of fractional counts must not depend on the number of ranks.
        layer: the layer of the model that belongs to its strategy.
        record: what earlier steps of the model have found out.
        found: attributes of the record that `backward` changes when the step has succeeded.
    """

    size = 1
    group: Any = None
    min_microbatches = 0
    equal_microbatches = has_ordered_sums = False

    def __init__(self, layer: nn.Module) -> None:
        self.layer: Any = layer
        self.record = record_of(layer)
        self.found: dict[str, Any] = {}


class StepCounts:
    """The counts of this rank's microbatches, and their sums over all ranks.

    Args:
        count: the argument of `backward`.
        held: the microbatches of this rank; `read` are their numbers of samples, from a loader.
        placeholder: a microbatch from which a rank without any learns the names of terms.

    Attributes:
        rows: the counts of each microbatch. Under "" it is the result of `count`, or the number of
            samples if that is a dict. The counts of terms are under their names.
    """

    def __init__(
        self, count: Count, held: Sequence[Any], read: Sequence[Any], placeholder: Any = None
    ) -> None:
        self._count, self._pairs = count, list(zip(held, read, strict=True))
        self._placeholder = placeholder
        # Zeros, in case `count` raises, which is raised on all ranks later.
        self.rows: list[Counts] = [{"": 0.0}] * len(held)
        self._names = [""]

    def _ask(self) -> dict[tuple[str, ...], float]:
        """Call `count` for each microbatch; return the names of terms, which ranks compare."""
        rows = [self._ask_for(data, partial(num_samples, data, read)) for data, read in self._pairs]
        is_shown = rows or self._placeholder is None
        for row in (shown := rows if is_shown else [self._ask_for(self._placeholder, int)]):
            if row.keys() != shown[0].keys() or len(row) > _MOST_TERMS + 1:
                msg = f"`count` must return the same names, at most {_MOST_TERMS}, but returned "
                msg += f"{sorted(shown[0])[1:]} and {sorted(row)[1:]}: return 0 for an absent term"
                raise ValueError(msg)
        if unseen := [row for row in rows if not row[""] and any(row.values())]:
            msg = "`count` must return 0 for a batch without samples, but returned "
            msg += f"{dict(unseen[0])}: put a tensor with a row for each sample first in the batch"
            raise ValueError(msg)
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
        """Start to sum over all ranks; return a function that waits for the sums by name.

        Args:
            replicas: the ranks that sum.
            numbers: the numbers of this rank's microbatches in the step.
            step_size: the number of microbatches of all ranks.
        """
        sums_of = self._started(replicas)

        @cache  # called for each microbatch, waits once
        def sums() -> Counts:
            fractions, *rest = sums_of()
            totals = rest[: len(self._names)]
            beginnings = [int(number) for number in rest[len(self._names) :]]
            if beginnings and fingerprints_match(beginnings):
                _log.warning(_SAME_SAMPLES, ranks=[0])
            if replicas.has_ordered_sums and replicas.size > 1 and fractions:
                totals = self._in_order(numbers, step_size)
            positive(totals[0])
            if self._count is num_samples:
                replicas.found["usual_count"] = totals[0]
            return dict(zip(self._names, totals, strict=True))

        return sums

    def _started(self, replicas: Replicas) -> Callable[[], Sequence[float]]:
        """Start to sum: the number of fractions, the counts, and a hash of the first samples."""
        is_world = replicas.size > 1 and replicas.size == dist.get_world_size()
        # A `CheckedCollective`, so that a rank in another call gets an error.
        checked = CheckedCollective("backward", self._ask, lambda _: "count") if is_world else None
        if checked is None:
            self._ask()
        table = self._table()
        local = [math.fsum(c) for c in zip(*table, strict=True)] or [0.0] * len(self._names)
        local.insert(0, sum(not float(number).is_integer() for row in table for number in row))
        # Without a `count` this is a model's first step: compare the samples of the ranks.
        if self._count is num_samples:
            local += fingerprint_slots(_beginning(self._pairs[0][0], replicas), replicas.size)
        if checked is not None:
            return checked.start(local)
        if replicas.size == 1:
            return lambda: local
        device = next(replicas.layer.parameters()).device
        numbers = torch.tensor(local, dtype=widest_float_dtype(device)).to(device)
        sums = start_all_reduce(numbers, replicas.group)
        return lambda: sums().tolist()

    def _table(self) -> list[list[float]]:
        return [[row.get(name, 0) for name in self._names] for row in self.rows]

    def _in_order(self, numbers: range, step_size: int) -> list[float]:
        """Return the exact sums over all microbatches, the same at every world size. Collective."""
        group, device = cpu_group_and_device(world())
        rows = [[0.0] * len(self._names)] * step_size
        rows[numbers.start : numbers.stop] = self._table()
        table = torch.tensor(rows, dtype=torch.float64, device=device)
        # Each row belongs to one rank, and the others add zeros.
        dist.all_reduce(table, group=group)
        return [math.fsum(column) for column in zip(*table.tolist(), strict=True)]


def _beginning(batch: Any, replicas: Replicas) -> str:
    """Return a hash of the first samples, unless a loader has divided them between the ranks.

    Otherwise return a text that differs between ranks.
    """
    with suppress(Exception):  # any tensor may fail to hash, and this is only for a warning
        record = delivered.get(batch)
        first_rows = [x[:8] for x in iter_tensors(batch) if x.ndim]
        if first_rows and (record is None or record.size != replicas.size):
            return content_hash(first_rows)
    return f"of rank {dist.get_rank()}"


def start_all_reduce(numbers: Tensor, group: Any) -> Callable[[], Tensor]:
    """Start an all-reduce; return a function that waits for it, on a GPU without the host."""
    work: Any = dist.all_reduce(numbers, group=group, async_op=True)

    def sums() -> Tensor:
        work.wait()
        return numbers

    return sums


def positive(total: float) -> float:
    """Return `total`; raise if it is 0."""
    if total == 0:
        raise ValueError("a step must count something, but all its microbatches count 0: skip it")
    return total


@dataclass(eq=False)
class Microbatch:
    """A microbatch that this rank runs. A placeholder has the count 0 and no number in the step.

    Attributes:
        counts: its count in each term of the loss, if `count` returns a dict.
    """

    data: Any
    count: float
    number: int = -1
    counts: Counts = field(default_factory=dict)


class LossWeights(NamedTuple):
    """The microbatches that this rank runs in a step, and the global counts.

    Attributes:
        microbatches: the microbatches in the order of running, placeholders first.
        most: the number of microbatches of the rank with most.
        totals: returns the sums of counts over all ranks by name; see `StepCounts`. For a batch
            that no loader made, it is the count of the model's first step, and `DistributedStep`
            rescales the gradients. It raises on every rank if a `count` failed, or all counts are
            0.
        dropped_samples: whether a microbatch has fewer samples than planned.
    """

    microbatches: list[Microbatch]
    most: int
    totals: Callable[[], Counts]
    dropped_samples: bool = False

    def global_total(self) -> float:
        """Return the count of all microbatches of all ranks."""
        return self.totals()[""]

    @classmethod
    def of(cls, batch: Any, count: Count | None, replicas: Replicas) -> "LossWeights":
        """Return the microbatches and weights of `batch`. Communicates if a `count` is given."""
        if not isinstance(batch, Microbatches):
            return cls._of_one(batch, count, replicas)
        if replicas.size not in (1, batch.size):
            raise ValueError(
                f"the ranks that train the model, {replicas.size}, must be those that share "
                f"`batch`, but it is shared by {batch.size}: pass distributed='auto' to make_loader"
            )
        held = batch[:]
        planned = [batch.counts[number] for number in batch.numbers]
        kept = [number - missing for number, missing in zip(planned, batch.missing, strict=True)]
        if count is None:
            counts = [*map(num_samples, held, kept)]
            totals = _constant(sum(counts if replicas.size == 1 else batch.counts))
            local = list(map(Microbatch, held, counts, batch.numbers))
        else:
            counted = StepCounts(count, held, kept, batch.placeholder)
            totals = counted.start(replicas, batch.numbers, len(batch.counts))
            both = zip(held, counted.rows, batch.numbers, strict=True)
            local = [Microbatch(data, row[""], number, row) for data, row, number in both]
        dropped_samples = count is None and [one.count for one in local] != planned
        if batch.by_cost and replicas.equal_microbatches:
            msg = "`batch` must be shared by number under 'fsdp', where all ranks run as many "
            raise ValueError(msg + "microbatches, but is shared by `cost`: leave it out")
        most = max(map(len, batch.ranges))
        wanted = max(replicas.min_microbatches, most if replicas.equal_microbatches else 0)
        if len(local) < wanted and batch.placeholder is None:
            msg = f"a rank must have a microbatch to run if the others run one, but {batch!r} has "
            msg += "none: give it a placeholder, any microbatch of the step"
            raise ValueError(msg)
        # First, so that the last microbatch, which synchronizes, is a real one if there is any.
        placeholders = [Microbatch(batch.placeholder, 0) for _ in range(wanted - len(local))]
        return cls(placeholders + local, most, totals, dropped_samples)

    @classmethod
    def _of_one(cls, batch: Any, count: Count | None, replicas: Replicas) -> "LossWeights":
        """Return the weights of a batch that no loader made, as the only microbatch."""
        usual = replicas.record.usual_count
        if count is None and (replicas.size == 1 or usual is not None):
            # All ranks assume the first step's global count, and rescale the gradients afterwards.
            samples = num_samples(batch)
            totals = _constant(samples if usual is None or replicas.size == 1 else usual)
            return cls([Microbatch(batch, samples, 0)], 1, totals)
        counted = StepCounts(count or num_samples, [batch], [None])
        totals = counted.start(replicas, range(1), 1)
        return cls([Microbatch(batch, counted.rows[0][""], 0, counted.rows[0])], 1, totals)


def _constant(total: float) -> Callable[[], Counts]:
    positive(total)
    return lambda: {"": total}
