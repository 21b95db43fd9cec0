"""What each microbatch of a step counts, and all of them together, over all ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import index
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from pardata.collective._header import Matching
from pardata.data._microbatches import Microbatches
from pardata.gradient._sample_count import samples_of
from pardata.ranks._world import world

Count = Callable[[Any], int]


@dataclass(eq=False)
class Sharing:
    """Who runs the microbatches of a step together.

    Attributes:
        size: how many ranks.
        group: their process group; None for that of the world.
        device: where the group reduces.
        least: how many microbatches a rank must run at least.
        equally_many: whether every rank must run as many as the one that has most.
    """

    size: int
    group: Any
    device: torch.device
    least: ClassVar[int] = 0
    equally_many: ClassVar[bool] = False


@dataclass(eq=False)
class Piece:
    """One microbatch that this rank runs; a stand-in counts 0 and has no number in the step."""

    microbatch: Any
    count: int
    number: int | None = None


class Pieces(NamedTuple):
    """The microbatches that this rank runs in a step.

    Attributes:
        own: what is run, in this order.
        most: the microbatches of the rank that has most.
        total: returns what the microbatches of all ranks count; raises, on every rank, where one
            of them could not be counted, or all count 0.
    """

    own: list[Piece]
    most: int
    total: Callable[[], int]

    @classmethod
    def of(cls, batch: Any, count: Count | None, sharing: Sharing) -> "Pieces":
        """Return what `batch` is made of. Communicates only where no plan says what counts."""
        if not isinstance(batch, Microbatches):
            counts, total = _counted([batch], samples_of if count is None else count, sharing)
            return cls([Piece(batch, counts[0], 0)], 1, total)
        if sharing.size not in (1, batch.size):
            raise ValueError(
                f"the ranks that train the model, {sharing.size}, must be those that share "
                f"`batch`, but it is shared by {batch.size}: pass distributed='auto' to make_loader"
            )
        held, first = batch[:], batch.first
        if count is None:
            counts = batch.counts[first : first + len(held)]
            total = partial(int, _positive(sum(counts if sharing.size == 1 else batch.counts)))
        else:
            counts, total = _counted(held, count, sharing)
        own = [Piece(*facts, first + n) for n, facts in enumerate(zip(held, counts, strict=True))]
        most = -(-len(batch.counts) // sharing.size)
        wanted = max(sharing.least, most if sharing.equally_many else 0)
        if len(own) < wanted and batch.stand_in is None:
            raise ValueError(
                f"a rank must have a microbatch to run where the others run one, but {batch!r} "
                f"has none: give it a stand_in, any microbatch of the step"
            )
        # First, so that what synchronises is a microbatch of this rank's own, if it has one.
        return cls([Piece(batch.stand_in, 0)] * (wanted - len(own)) + own, most, total)


def _counted(
    microbatches: Sequence[Any], count: Count, sharing: Sharing
) -> tuple[Sequence[int], Callable[[], int]]:
    """Count the microbatches here, and begin to add up those of all ranks."""
    error: Exception | None = None
    counts = [0] * len(microbatches)
    try:
        counts = [_checked(count(microbatch)) for microbatch in microbatches]
    except Exception as raised:  # noqa: BLE001  # raised again once all ranks know
        error = raised
    sums = _start_sum([sum(counts), error is not None], sharing)

    @cache  # asked for with each microbatch, and a GPU would be waited for each time
    def total() -> int:
        everything, failed = map(int, sums())
        if error is not None:
            raise error
        if failed:
            raise RuntimeError(
                f"every microbatch must be counted, but that failed on {failed} other rank(s): "
                f"see the error there"
            )
        return _positive(everything)

    return counts, total


def _start_sum(own: list[float], sharing: Sharing) -> Callable[[], Sequence[float]]:
    """Begin to add up a few numbers over the ranks, and return what waits for the sums."""
    if sharing.size == 1:
        return lambda: own
    here = world()
    if sharing.size == here.size:
        # In the form of all other collectives of ours: a rank that is in another one is told.
        return Matching(here, "backward", 0, lambda _: "counts").start_all_reduce(own)
    told = torch.tensor(own, device=sharing.device)
    work: Any = dist.all_reduce(told, group=sharing.group, async_op=True)

    def sums() -> list[float]:
        work.wait()
        found: list[float] = told.tolist()
        return found

    return sums


def _checked(number: Any) -> int:
    try:
        if isinstance(number, bool):
            raise TypeError
        whole = index(number)  # of NumPy, or a tensor, too
    except TypeError:
        raise TypeError(
            f"`count` must return an integer, but returned {number!r} ({type(number).__name__})"
        ) from None
    if whole < 0:
        raise ValueError(f"`count` must return an integer from 0 up, but returned {whole}")
    return whole


def _positive(total: int) -> int:
    if total == 0:
        raise ValueError("a step must count something, but all its microbatches count 0: skip it")
    return total
