"""The arithmetic of shares, for all sizes, and the hash that seeds are made by.

What it makes of steps and microbatches: test_same_batches.py.
"""

from hypothesis import given
from hypothesis import strategies as st

from pardata.data._plan import local_range
from pardata.rng._seeds import mix


@given(st.integers(0, 10_000), st.integers(1, 17))
def test_shares_are_consecutive_and_differ_by_at_most_one(count, size):
    shares = [local_range(count, rank, size) for rank in range(size)]
    assert [position for part in shares for position in part] == list(range(count))
    counts = [len(part) for part in shares]
    assert max(counts) - min(counts) <= 1
    assert counts[0] == max(counts)


def test_golden_values_of_the_hash():
    # The first is SplitMix64's first output for seed 0, halved: 0xE220A8397B1DCDAF >> 1.
    assert mix(0) == 0xE220A8397B1DCDAF >> 1
    assert mix(0, 0) == 6017775124710473527
    assert mix(1, 2, 3) == 3851293329796251419
