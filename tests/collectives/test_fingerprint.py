"""Deciding from sums alone whether all ranks brought the same."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from pardata.collectives._fingerprint import fingerprint_slots, fingerprints_match

sizes = st.integers(1, 8192) | st.sampled_from([2, 3, 8191, 8192])


def summed(texts):
    """Return the header's sums as float64 would give them, in one order and in the other."""
    rows = [fingerprint_slots(text, len(texts)) for text in texts]
    header = torch.tensor(rows, dtype=torch.float64)
    forward, backward = header.cumsum(0)[-1].tolist(), header.flip(0).cumsum(0)[-1].tolist()
    assert forward == backward  # exact: the order of a reduction does not matter
    assert forward == [sum(column) for column in zip(*rows, strict=True)]  # in integers
    return forward


@given(st.text(), st.text(), sizes, st.data())
def test_one_rank_that_brings_another_is_found(text, other, size, data):
    texts = [text] * size
    texts[data.draw(st.integers(0, size - 1))] = other
    assert fingerprints_match(summed(texts)) is (text == other or size == 1)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=200))
def test_any_mixture_is_found(texts):
    assert fingerprints_match(summed(texts)) is (len(set(texts)) == 1)
