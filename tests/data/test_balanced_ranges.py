"""The cut with the smallest largest share, against all cuts. Whole steps: test_cost.py."""

from itertools import accumulate, combinations, pairwise

from hypothesis import assume, example, given
from hypothesis import strategies as st

from pardata.data._plan import balanced_ranges, even_ranges

NUMBERS = st.integers(0, 20) | st.floats(0, 1e9)


@given(st.lists(NUMBERS, min_size=1, max_size=9), st.integers(1, 9))
@example([0.1, 0.2, 0.3, 0.1], 3)  # the sums are rounded
@example([5, 0, 0, 0, 0], 4)
def test_no_cut_of_consecutive_costs_has_a_smaller_largest_share(costs, size):
    assume(size <= len(costs))
    sums = [0, *accumulate(costs)]

    def largest(ends):
        return max(sums[end] - sums[start] for start, end in pairwise(ends))

    ranges = balanced_ranges(sums, size)
    ends = [0, *(part.stop for part in ranges)]
    assert [part.start for part in ranges] == ends[:-1]
    assert len(ranges) == size
    assert ends[-1] == len(costs)
    assert all(ranges)
    inner = combinations(range(1, len(costs)), size - 1)
    assert largest(ends) == min(largest((0, *cut, len(costs))) for cut in inner)


@given(st.integers(1, 60), st.integers(1, 20))
def test_equal_costs_give_the_ranges_of_equal_number(count, size):
    assume(size <= count)
    assert balanced_ranges([3.0 * n for n in range(count + 1)], size) == even_ranges(count, size)
