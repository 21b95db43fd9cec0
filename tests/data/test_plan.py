"""The arithmetic of steps and shares, for all sizes, and the hash that seeds are made by."""

import math

from hypothesis import given
from hypothesis import strategies as st

from pardata.data._plan import Plan, share
from pardata.seeds._mix import mix

lengths = st.integers(0, 300)
batch_sizes = st.integers(1, 64)
sizes = st.integers(1, 17)


@given(st.integers(0, 10_000), sizes)
def test_shares_are_runs_in_rank_order_that_differ_by_one_and_the_first_get_more(count, size):
    shares = [share(count, rank, size) for rank in range(size)]
    assert [position for part in shares for position in part] == list(range(count))
    counts = [len(part) for part in shares]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@given(lengths, batch_sizes, st.booleans())
def test_steps_are_consecutive_and_whole_but_the_last(length, batch_size, drop_last):
    plan = Plan(length, batch_size, drop_last)
    whole = [position for number in range(len(plan)) for position in plan[number]]
    assert len(plan) == (math.floor if drop_last else math.ceil)(length / batch_size)
    assert whole == list(range(length // batch_size * batch_size if drop_last else length))


@given(st.integers(1, 64), st.none() | st.integers(1, 64), sizes)
def test_the_ranks_shares_are_the_step_in_pieces_that_do_not_depend_on_their_number(
    samples, microbatch_size, size
):
    team = [
        Plan(None, 64, False, microbatch_size, rank, size).share_of(samples) for rank in range(size)
    ]
    team, runs = zip(*team, strict=True)
    own = [each if shared.rows else [] for shared, each in zip(team, runs, strict=True)]
    assert [n for each in own for run in each for n in run] == list(range(samples))
    assert {shared.samples for shared in team} == {samples}
    assert [shared.rows for shared in team] == [sum(map(len, each)) for each in own]
    (counts,) = {shared.counts for shared in team}
    if microbatch_size is None:
        assert counts == (samples,)
        assert {shared.first for shared in team} == {0}
    else:
        assert counts == tuple(len(run) for each in own for run in each)
        assert set(counts[:-1]) <= {microbatch_size}
        assert [shared.first for shared in team] == [
            sum(map(len, own[:rank])) for rank in range(size)
        ]
    placeholder = range(samples)[: microbatch_size or 1]
    assert all(own == [placeholder] for own, step in zip(runs, team, strict=True) if not step.rows)


def test_golden_values_of_the_hash():
    # The first is SplitMix64's first output for seed 0, halved: 0xE220A8397B1DCDAF >> 1.
    assert mix(0) == 0xE220A8397B1DCDAF >> 1
    assert mix(0, 0) == 6017775124710473527
    assert mix(1, 2, 3) == 3851293329796251419


def test_a_hash_depends_on_every_number_and_on_their_order():
    hashes = [mix(a, b, c) for a in range(12) for b in range(12) for c in range(12)]
    assert len(set(hashes)) == 12**3


@given(st.integers(0, 2**64 - 1), st.integers(0, 63))
def test_one_bit_of_the_seed_changes_many_of_a_hash_of_63_bits(seed, bit):
    assert 0 <= mix(seed) < 2**63
    assert 10 <= (mix(seed) ^ mix(seed ^ (1 << bit))).bit_count() <= 54
