"""Deciding from sums alone whether all ranks brought the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pardata.collective._header import _HASHES, all_equal, hashes

sizes = st.integers(1, 8192) | st.sampled_from([2, 3, 8191, 8192])


def summed(texts):
    """Return the header's sums as float64 would give them, in one order and in the other."""
    rows = [hashes(text, len(texts)) for text in texts]
    header = torch.tensor(rows, dtype=torch.float64)
    forward, backward = header.cumsum(0)[-1].tolist(), header.flip(0).cumsum(0)[-1].tolist()
    assert forward == backward  # exact: the order of a reduction does not matter
    assert forward == [sum(column) for column in zip(*rows, strict=True)]  # in integers
    return forward


@given(st.text(), st.text(), sizes, st.data())
def test_one_rank_that_brings_another_is_found(text, other, size, data):
    texts = [text] * size
    texts[data.draw(st.integers(0, size - 1))] = other
    assert all_equal(summed(texts), size) is (text == other or size == 1)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=200))
def test_any_mixture_is_found(texts):
    assert all_equal(summed(texts), len(texts)) is (len(set(texts)) == 1)


@given(sizes, st.data())
def test_the_smallest_difference_between_large_hashes_is_found(size, data):
    # The worst case for rounding: W - 1 ranks have the largest hash there is, one has one less.
    largest = 2 ** _bits(size) - 1
    told = [largest] * size
    told[data.draw(st.integers(0, size - 1))] -= 1
    sums = [float(sum(told))] * _HASHES + [float(sum(h * h for h in told))] * _HASHES
    assert all_equal(sums, size) is (size == 1)


def _bits(size):
    # The largest hash of many: all bits that may be set are set in one of them.
    seen = 0
    for i in range(64):
        for h in hashes(str(i), size)[:_HASHES]:
            seen |= h
    return seen.bit_length()


@pytest.mark.parametrize(("size", "bits"), [(1, 20), (2, 20), (8192, 20), (8193, 19), (10**6, 16)])
def test_hashes_are_as_large_as_the_sums_allow(size, bits):
    assert _bits(size) == bits


def test_hashes_of_one_text_are_independent_of_each_other():
    columns = zip(*(hashes(str(i), 2)[:_HASHES] for i in range(300)), strict=True)
    assert all(len(set(column)) > 290 for column in columns)
