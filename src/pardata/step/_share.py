"""The microbatches that a rank runs in a step, and what those of all ranks count."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pardata.data._microbatches import Microbatches
from pardata.data._sample_count import samples_of
from pardata.step._count import Count, Counts, Replicas, StepCounts, positive

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
        totals: returns what the microbatches of all ranks count, the same on all ranks, by name;
            see `StepCounts`. It goes by the plan or, without one, by the model's first such step.
            It raises, on every rank, if a `count` failed, or all counts are 0.
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
        """Return what `batch` is made of. Communicates only where a `count` is told, or nothing."""
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
            # Known here alone. That all ranks together have the usual number is a guess, but the
            # same one on all, whatever each has made of its batch: they correct it once they know
            # the sum.
            own = samples_of(batch)
            known = _known(own if usual is None or replicas.size == 1 else usual)
            return cls([Microbatch(batch, own, 0)], 1, known)
        counted = StepCounts(count or samples_of, [batch], [None])
        totals = counted.start(replicas, range(1), 1)

        def remembered() -> Counts:
            vars(replicas.layer)[_USUAL] = totals()[""]
            return totals()

        one = Microbatch(batch, counted.rows[0][""], 0, counted.rows[0])
        return cls([one], 1, remembered if count is None else totals)


def _known(total: float) -> Callable[[], Counts]:
    positive(total)
    return lambda: {"": total}
