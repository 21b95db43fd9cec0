"""Cuts consecutive costs into one range for each rank, so that the largest share is smallest.

Does not change the order: it only decides where the range of each rank ends.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import pairwise


def balanced_ranges(sums: Sequence[float], size: int) -> tuple[range, ...]:
    """Return the range of each of `size` ranks: of all cuts, one whose largest share is smallest.

    Each range has at least one cost. Equal costs give ranges of equal length.

    `sums` are the sum of the costs before each, and of all. There are at least `size` costs.

    >>> balanced_ranges([0, 9, 10, 11, 12], 2)
    (range(0, 1), range(1, 4))
    """
    latest, largest = _smallest_cut(sums, size)
    ends = [len(sums) - 1]
    for rank in range(size - 1, 0, -1):
        # The end nearest to an equal share at which no rank gets more than `largest`.
        nearest = bisect_left(sums, sums[-1] * rank / size)
        earliest = bisect_left(sums, -largest, rank, key=partial(_minus, sums[ends[0]]))
        ends.insert(0, max(min(nearest, latest[rank], ends[0] - 1), earliest))
    return tuple(range(*pair) for pair in pairwise([0, *ends]))


def _smallest_cut(sums: Sequence[float], size: int) -> tuple[list[int], float]:
    """Return the ends of the cut with the smallest largest share, each as late as it can be.

    A bisection between `low`, the least share that is not excluded, and `high`, the largest share
    of a cut. Both are differences of sums, so that the search ends at an exact one.
    """
    low, high = 0.0, math.inf
    best = _filled(sums, size, high)
    high = sums[-1]
    while low < high:
        limit = min((low + high) / 2, math.nextafter(high, 0))
        ends = _filled(sums, size, limit)
        if ends[-1] == len(sums) - 1:
            best, high = ends, max(sums[end] - sums[start] for start, end in pairwise(ends))
        else:
            wider = (sums[min(end + 1, len(sums) - 1)] - sums[s] for s, end in pairwise(ends))
            low = min(share for share in wider if share > limit)
    return best, high


def _filled(sums: Sequence[float], size: int, limit: float) -> list[int]:
    """Return 0 and the end of each rank's range, where each gets as much as `limit` allows.

    A rank leaves one cost for each later rank. The last end is less than the number of costs if
    there is no cut whose shares are all within `limit`.
    """
    ends = [0]
    for rank in range(size):
        start, most = ends[-1], len(sums) - size + rank
        shares = partial(_minus, sums[start])
        ends.append(bisect_right(sums, limit, start + 1, most + 1, key=shares) - 1)
    return ends


def _minus(start: float, end: float) -> float:
    return end - start
