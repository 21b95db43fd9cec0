"""The fixed tree: the same bits whoever adds, identities change none, and near the true sum."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pardata.data._plan import even_ranges
from pardata.strategies.exact._tree_all_reduce import IDENTITY, TreeStack, subtrees_by_rank

special = st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 3e38, -3e38, 1e-45, 1.0])
numbers = st.one_of(special, st.floats(width=32))
# Of each microbatch what it leaves; the identity where it does not use the parameter.
leaves = st.lists(st.one_of(st.just(IDENTITY), numbers), min_size=1, max_size=70)


def stack_of(count):
    return TreeStack(count, lambda left, right: left + right)


def by_ranks(told, ranges):
    """Add as ranks do, each its range, and what owners then do."""
    owner, found = stack_of(len(told)), []
    for part, expected in zip(ranges, subtrees_by_rank(ranges), strict=True):
        own = stack_of(len(told))
        for number in part:
            own.push((number, number + 1), torch.tensor(told[number]))
        assert [span for span, _ in own.subtrees] == list(expected)
        found += own.subtrees
    for span, value in found:
        owner.push(span, value)
    ((span, total),) = owner.subtrees
    assert span == (0, len(told))
    return total


def bits(total):
    # Which of two NaN is the sum of both, processors may decide.
    return "NaN" if total.isnan() else total.view(torch.int32).item()


@given(leaves, st.integers(1, 8), st.lists(st.integers(0, 70), max_size=7))
def test_a_sum_is_bitwise_equal_however_the_ranks_share_it(told, size, cuts):
    count = len(told)
    ends = [0, *sorted(min(cut, count) for cut in cuts), count]
    expected = bits(by_ranks(told, (range(count),)))
    assert bits(by_ranks(told, even_ranges(count, size))) == expected
    assert bits(by_ranks(told, tuple(range(*pair) for pair in pairwise(ends)))) == expected


@given(numbers)
def test_the_identity_changes_no_bit(number):
    both = torch.tensor(number), torch.tensor(IDENTITY)
    assert {bits(sum(both[1:], both[0])), bits(both[1] + both[0])} == {bits(both[0])}


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300))
def test_the_error_of_a_sum_grows_with_the_tree_height(told):
    true = sum(map(Fraction, told))
    height = math.ceil(math.log2(len(told)))
    most = Fraction(2) ** -24 * height * sum(abs(Fraction(x)) for x in told)
    least = Fraction(2) ** -149 * len(told)
    assert (
        abs(Fraction(by_ranks(told, (range(len(told)),)).item()) - true)
        <= Fraction(101, 100) * most + least
    )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_of_two_or_four_ranks_has_at_most_one_subtree(size):
    for count in range(1, 300):
        assert max(map(len, subtrees_by_rank(even_ranges(count, size)))) == 1


def test_pieces_of_other_numbers_of_ranks():
    assert subtrees_by_rank(even_ranges(6, 3)) == (((0, 2),), ((2, 3), (3, 4)), ((4, 5), (5, 6)))
    assert [len(own) for own in subtrees_by_rank(even_ranges(2, 4))] == [1, 0, 1, 0]
