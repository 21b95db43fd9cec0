"""The positions of each step, and of each rank in a step: arithmetic, without group or dataset.

N samples, global batch B, world size W. Epoch e has an order of the N samples. Step k is the
positions kB … min((k+1)B, N)-1 of that order, for every W. Each rank gets a contiguous range of
them.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from operator import add
from typing import Any, NamedTuple


def local_range(count: int, rank: int, size: int) -> range:
    """Return this rank's contiguous range of ``range(count)``; lengths differ by at most one.

    It ends at ceil((rank + 1) * count / size). So on 2 and 4 ranks each range is a subtree of the
    reduction tree of ``"exact"``.

    >>> [list(local_range(5, rank, 3)) for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    return range(-(-rank * count // size), -(-(rank + 1) * count // size))


def even_ranges(count: int, size: int) -> tuple[range, ...]:
    """Return the `local_range` of each of `size` ranks."""
    return tuple(local_range(count, rank, size) for rank in range(size))


def balanced_ranges(sums: Sequence[float], size: int) -> tuple[range, ...]:
    """Return the range of each of `size` ranks, with the cut whose largest local cost is smallest.

    Each range has at least one cost. Equal costs give ranges of equal length.

    `sums` are the sum of the costs before each, and of all. There are at least `size` costs.

    >>> balanced_ranges([0, 9, 10, 11, 12], 2)
    (range(0, 1), range(1, 4))
    """
    latest, largest = _smallest_cut(sums, size)
    ends = [len(sums) - 1]
    for rank in range(size - 1, 0, -1):
        # The end nearest to equal costs at which no rank gets more than `largest`.
        nearest = bisect_left(sums, sums[-1] * rank / size)
        earliest = bisect_left(sums, -largest, rank, key=partial(add, -sums[ends[0]]))
        ends.insert(0, max(min(nearest, latest[rank], ends[0] - 1), earliest))
    return tuple(range(*pair) for pair in pairwise([0, *ends]))


def _smallest_cut(sums: Sequence[float], size: int) -> tuple[list[int], float]:
    """Return the ends of the cut whose largest local cost is smallest, each as late as it can be.

    A bisection between `low`, the least cost that is not excluded, and `high`, the largest local
    cost of a cut. Both are differences of sums, so that the search ends at an exact one.
    """
    low, high, best = 0.0, sums[-1], _filled(sums, size, math.inf)
    while low < high:
        limit = min((low + high) / 2, math.nextafter(high, 0))
        ends = _filled(sums, size, limit)
        if ends[-1] == len(sums) - 1:
            best, high = ends, max(sums[end] - sums[start] for start, end in pairwise(ends))
        else:
            wider = (sums[min(end + 1, len(sums) - 1)] - sums[s] for s, end in pairwise(ends))
            low = min(cost for cost in wider if cost > limit)
    return best, high


def _filled(sums: Sequence[float], size: int, limit: float) -> list[int]:
    """Return 0 and the end of each rank's range, where each gets as much as `limit` allows.

    A rank leaves one cost for each later rank. The last end is less than the number of costs if
    there is no cut whose local costs are all within `limit`.
    """
    ends = [0]
    for rank in range(size):
        start, most = ends[-1], len(sums) - size + rank
        costs = partial(add, -sums[start])
        ends.append(bisect_right(sums, limit, start + 1, most + 1, key=costs) - 1)
    return ends


class StepInfo(NamedTuple):
    """A step as one rank sees it.

    Attributes:
        ranges: the range of each rank: of microbatches, or of samples.
        loads: of the largest local batch, in samples or by `cost`; of the largest if the
            ranges had equal numbers; and the mean. Not known if each rank reads samples of its own.
    """

    epoch: int
    number: int  # number within the epoch
    first: int  # number within the step of this rank's first microbatch, else 0
    local_samples: int  # samples of this rank; with 0 it reads a placeholder
    samples: int  # samples of the step over all ranks
    ranges: tuple[range, ...] = ()
    loads: tuple[float, float, float] = (math.nan, math.nan, 1.0)


class FetchedStep(NamedTuple):
    """The collated batches of one step; a NamedTuple, because ``DataLoader`` pins its fields."""

    step: StepInfo
    batches: list[Any]  # one for each microbatch, or one local batch
    digest: str = ""  # hash of the first samples that a stream's reader read in this epoch
    state: Any = None  # the dataset's state after this step, of a stateful stream
    missing: Sequence[int] = ()  # the number of samples of each batch that are None


@dataclass(eq=False)
class Plan:
    """Divides the positions of an epoch into steps, and each step into local batches.

    With a `microbatch_size` a step is divided into microbatches, of which the last may be short,
    and a local batch is a range of microbatches. Otherwise it is a range of samples. A stream may
    have no `length`. A sampler's length replaces the dataset's in each epoch. With a
    ``batch_sampler``, which makes the steps, `batch_size` is 0. Step 0 begins at position `start`,
    which is above 0 only in an epoch that is resumed with another batch size. With `costs`, a
    float64 tensor with one for each sample, local batches have about equal costs, not sizes.
    """

    length: int | None
    batch_size: int
    drop_last: bool
    microbatch_size: int | None = None
    rank: int = 0
    size: int = 1
    start: int = 0
    costs: Any = None

    def __len__(self) -> int:
        # Callers have a length and a batch size.
        full, rest = divmod((self.length or 0) - self.start, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __getitem__(self, number: int) -> range:
        """Return the positions of the global batch of step `number`."""
        start = self.start + number * self.batch_size
        return range(self.length or 0)[start : start + self.batch_size]

    def check(self, *, shuffled: bool) -> None:
        """Raise if there is no step, or the last shuffled one leaves a rank without a sample."""
        length = self.length or 0
        if self.drop_last and self.batch_size > length:
            msg = f"`batch_size` must be at most {length} with drop_last, but is {self.batch_size}"
            raise ValueError(msg)
        if shuffled and 0 < self.rest < self.size:
            msg = "the last batch must have one sample a rank,"
            raise ValueError(f"{msg} but has {self.rest}: pass drop_last=True")

    @property
    def rest(self) -> int:
        """The samples of an incomplete last batch, if there is one and ranks divide its samples."""
        is_kept = self.length and self.batch_size and not (self.drop_last or self.microbatch_size)
        return ((self.length or 0) - self.start) % self.batch_size if is_kept else 0

    def local_ranges(
        self, samples: int, epoch: int = 0, number: int = 0, costs: Sequence[float] | None = None
    ) -> tuple[StepInfo, list[range]]:
        """Return a step of `samples` samples, and this rank's ranges of them, one a microbatch.

        A rank without samples reads a placeholder. With microbatches it is the first one of the
        step, in case all ranks must run one. Otherwise it is the first sample, which gives an empty
        batch its shape. `costs` are those of the samples, by default 1.
        """
        size = self.microbatch_size or 1
        sums = range(samples + 1) if costs is None else [0.0, *accumulate(costs)]
        sums = [*sums[:samples:size], sums[samples]]  # one for each microbatch
        by_number = ranges = even_ranges(len(sums) - 1, self.size)
        if costs is not None and sums[-1] > 0 and len(sums) > self.size:
            ranges = balanced_ranges(sums, self.size)
        local = ranges[self.rank]
        first, positions = local.start, [range(samples)[n * size : (n + 1) * size] for n in local]
        if self.microbatch_size is None:
            first, positions = 0, [local]
        local_samples = sum(map(len, positions))
        positions = positions if local_samples else [range(samples)[:size]]
        largest, usual = (
            max(sums[r.stop] - sums[r.start] for r in each) for each in (ranges, by_number)
        )
        loads = largest, usual, sums[-1] / self.size
        return StepInfo(epoch, number, first, local_samples, samples, ranges, loads), positions

    def microbatch_sizes(self, samples: int) -> tuple[int, ...]:
        """Return the sizes of all microbatches of a step of `samples` samples, over all ranks."""
        size = self.microbatch_size or samples
        return (size,) * (samples // size) + ((samples % size,) if samples % size else ())
