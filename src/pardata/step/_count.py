"""What each microbatch of a step counts here, and what those of all ranks count as far as known."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import index
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pardata._pytree import content_hash
from pardata._validation import check_int
from pardata.collectives._fingerprint import (
    CheckedCollective,
    fingerprint_slots,
    fingerprints_match,
)
from pardata.data._batch_parts import tensors_of
from pardata.data._microbatches import Microbatches
from pardata.data._sample_count import delivered, samples_of
from pardata.environment._logger import get_logger
from pardata.store._remote_error import mark_secondary

_log = get_logger(__name__)

Count = Callable[[Any], int]
Total = Callable[[], int]

_USUAL = "_pardata_usual_count"  # set on the layer of a model that shows its strategy


class Replicas:
    """Who runs the microbatches of a step together: here only this process.

    Attributes:
        size: how many ranks.
        group: their process group; None for that of the world.
        least: how many microbatches a rank must run at least.
        equally_many: whether every rank must run as many as the one that has most.
        layer: of the model: the one that its strategy is known by.
    """

    size = 1
    group: Any = None
    least = 0
    equally_many = False
    layer: Any


@dataclass(eq=False)
class Microbatch:
    """A microbatch that this rank runs; a placeholder counts 0 and has no number in the step."""

    data: Any
    count: int
    number: int = -1


class Share(NamedTuple):
    """The microbatches that this rank runs in a step.

    Attributes:
        microbatches: what is run, in this order.
        most: the microbatches of the rank that has most.
        expected: returns what the microbatches of all ranks count, the same number on all ranks. It
            goes by the plan or, without one, by the model's first such step. It raises, on every
            rank, if a `count` failed, or all counts are 0.
        left_out: whether fewer samples are here than planned.
    """

    microbatches: list[Microbatch]
    most: int
    expected: Total
    left_out: bool = False

    @classmethod
    def of(cls, batch: Any, count: Count | None, replicas: Replicas) -> "Share":
        """Return what `batch` is made of. Communicates only where a `count` is told, or nothing."""
        if not isinstance(batch, Microbatches):
            number, expected = _of_one(batch, count, replicas)
            return cls([Microbatch(batch, number, 0)], 1, expected)
        if replicas.size not in (1, batch.size):
            raise ValueError(
                f"the ranks that train the model, {replicas.size}, must be those that share "
                f"`batch`, but it is shared by {batch.size}: pass distributed='auto' to make_loader"
            )
        held = batch[:]
        planned = tuple(batch.counts[number] for number in batch.numbers)
        if count is None:
            counts: Sequence[int] = tuple(map(samples_of, held, planned))
            expected = _known(sum(counts if replicas.size == 1 else batch.counts))
        else:
            counts, expected = _counted(held, count, replicas)
        own = list(map(Microbatch, held, counts, batch.numbers))
        most = -(-len(batch.counts) // replicas.size)
        wanted = max(replicas.least, most if replicas.equally_many else 0)
        if len(own) < wanted and batch.placeholder is None:
            raise ValueError(
                f"a rank must have a microbatch to run if the others run one, but {batch!r} "
                f"has none: give it a placeholder, any microbatch of the step"
            )
        # First, so that what synchronises is a microbatch of this rank's own, if it has one.
        placeholders = [Microbatch(batch.placeholder, 0) for _ in range(wanted - len(own))]
        left_out = count is None and counts != planned
        return cls(placeholders + own, most, expected, left_out)


def _of_one(batch: Any, count: Count | None, replicas: Replicas) -> tuple[int, Total]:
    """Return what `batch` counts here, and what is expected of all ranks."""
    usual: int | None = vars(replicas.layer).get(_USUAL)
    if count is None and (replicas.size == 1 or usual is not None):
        # Known here alone. That all ranks together have the usual number is a guess, but the same
        # one on all, whatever each has made of its batch: they correct it once they know the sum.
        own = samples_of(batch)
        return own, _known(own if usual is None or replicas.size == 1 else usual)
    (own,), expected = _counted([batch], count or samples_of, replicas)

    def remembered() -> int:
        vars(replicas.layer)[_USUAL] = total = expected()
        return total

    return own, remembered if count is None else expected


def _known(total: int) -> Total:
    positive(total)
    return lambda: total


def _counted(held: Sequence[Any], count: Count, replicas: Replicas) -> tuple[Sequence[int], Total]:
    """Count the microbatches here, and begin to add up those of all ranks."""
    error: Exception | None = None
    counts = [0] * len(held)
    try:
        counts = [checked_count(count(microbatch)) for microbatch in held]
    except Exception as raised:  # noqa: BLE001  # raised again once all ranks know
        error = raised
    # Without a `count` this is a model's first step: do all ranks have the same samples?
    seen = (
        fingerprint_slots(_beginning(held[0], replicas), replicas.size)
        if count is samples_of
        else []
    )
    sums = _start_sum([sum(counts), error is not None, *seen], replicas)

    @cache  # asked for with each microbatch, and waited for once
    def total() -> int:
        everything, failed, *beginnings = map(int, sums())
        if beginnings and fingerprints_match(beginnings, replicas.size):
            text = (
                "all ranks train on the same samples: a plain DataLoader gives each of them the "
                "whole dataset, and so does make_loader with distributed=False. Use make_loader "
                "without it."
            )
            _log.warning(text, ranks=[0])
        if error is not None:
            raise error
        if failed:
            text = f"every microbatch must be counted, but that failed on {failed} other rank(s)"
            raise mark_secondary(RuntimeError(f"{text}: see the error there"))
        return positive(everything)

    return counts, total


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


def _start_sum(own: list[float], replicas: Replicas) -> Callable[[], Sequence[float]]:
    """Begin to add up a few numbers over the ranks, and return what waits for the sums."""
    if replicas.size == 1:
        return lambda: own
    if replicas.size == dist.get_world_size():
        # In the form of all other collectives of ours: a rank that is in another one is told.
        return CheckedCollective("backward", lambda: {(): 0}, lambda _: "counts").start(own)
    numbers = torch.tensor(own, device=next(replicas.layer.parameters()).device)
    sums = started(numbers, replicas.group)
    return lambda: sums().tolist()


def started(numbers: Tensor, group: Any) -> Callable[[], Tensor]:
    """Begin to add up numbers over ranks, and return what waits for the sums, unless on a GPU."""
    work: Any = dist.all_reduce(numbers, group=group, async_op=True)

    def sums() -> Tensor:
        work.wait()
        return numbers

    return sums


def checked_count(number: Any) -> int:
    """Return what `count` has returned, which may be of NumPy, or a tensor, too."""
    if hasattr(number, "__index__") and not isinstance(number, bool):
        number = index(number)
    check_int("count(microbatch)", number, least=0)
    return int(number)


def positive(total: int) -> int:
    """Return `total`, unless it is 0."""
    if total == 0:
        raise ValueError("a step must count something, but all its microbatches count 0: skip it")
    return total
