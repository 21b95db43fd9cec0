"""What ranks send each other behind the gradients of an exact step: nothing of it is rounded."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pardata.strategies.exact import _ordered_sum
from pardata.strategies.exact._fixed_tree import Stack
from pardata.strategies.exact._ordered_sum import Exchange
from pardata.strategies.exact._riders import Riders

special = st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1e308, 1 + 2**-52])
numbers = st.one_of(special, st.floats())


def exchange_of(count, rank, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ordered_sum, "world", lambda: SimpleNamespace(rank=rank, size=size))
        return Exchange(count)


def received_by_all(leaves, size, flags):
    """Send as each rank does, add, and return what all receive: `leaves` are those of all ranks."""
    hows = [exchange_of(len(leaves), rank, size) for rank in range(size)]
    rows = [[[subtree] for subtree in subtrees_of(how, leaves)] or [[0.0]] for how in hows]
    of_ranks = zip(hows, rows, flags, strict=True)
    riders = [Riders(how, torch.tensor(own, dtype=torch.float64), f) for how, own, f in of_ranks]
    return riders[0].received(torch.stack([each.sent() for each in riders]).sum(0))


def subtrees_of(how, leaves):
    """Return what a rank has added up of the leaves of its spans."""
    return [folded(leaves, span) for span in how.spans[how.first : how.first + how.own]]


def folded(leaves, span=None):
    low, high = span or (0, len(leaves))
    stack = Stack(len(leaves), lambda left, right: left + right)
    for number in range(low, high):
        stack.push((number, number + 1), torch.tensor(leaves[number], dtype=torch.float64))
    ((_, total),) = stack.subtrees
    return total.item()


@given(st.lists(numbers, min_size=4, max_size=20), st.integers(2, 4), st.data())
def test_all_receive_the_flags_of_any_and_the_bits_of_the_tree(leaves, size, data):
    own = st.lists(st.booleans(), min_size=4, max_size=4)
    flags = [data.draw(own) for _ in range(size)]
    of_any, sums = received_by_all(leaves, size, flags)
    assert of_any == [any(column) for column in zip(*flags, strict=True)]
    expected = torch.tensor([folded(leaves)], dtype=torch.float64)
    same = sums.view(torch.int64) == expected.view(torch.int64)
    # Which of two NaN is the sum of both, processors may decide.
    assert same.all() or bool(sums.isnan().all() and expected.isnan().all())


@pytest.mark.parametrize(
    ("count", "size", "width", "fits"),
    [(8, 1, 1, False), (8, 2, 1, True), (1, 2, 1, True), (2, 3, 1, False), (8, 4, 5000, False)],
)
def test_they_ride_where_they_are_few_and_all_ranks_send(count, size, width, fits):
    how = exchange_of(count, 0, size)
    assert Riders(how, torch.zeros(1, width, dtype=torch.float64), [True]).fit() == fits
