"""The arithmetic of orders, steps and shares, for all sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardata._sampling import Plan, mix, share, shuffled

seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 10_000)
lengths = st.integers(0, 300)
batch_sizes = st.integers(1, 64)
sizes = st.integers(1, 17)


def plans(length, batch_size, size, *, drop_last=False):
    return [Plan(length, batch_size, drop_last, rank, size) for rank in range(size)]


@given(st.integers(0, 10_000), sizes)
def test_shares_are_runs_in_rank_order_that_make_up_the_whole(count, size):
    shares = [share(count, rank, size) for rank in range(size)]
    assert [position for part in shares for position in part] == list(range(count))


@given(st.integers(0, 10_000), sizes)
def test_shares_differ_by_at_most_one_and_the_first_ranks_get_more(count, size):
    counts = [len(share(count, rank, size)) for rank in range(size)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[-1] <= 1


@given(lengths, batch_sizes, sizes, st.booleans())
def test_a_step_is_the_same_samples_at_every_world_size(length, batch_size, size, drop_last):
    alone = Plan(length, batch_size, drop_last)
    team = plans(length, batch_size, size, drop_last=drop_last)
    assert {len(plan) for plan in team} == {len(alone)}
    for step in range(len(alone)):
        together = [position for plan in team for position in plan.share(step)]
        assert together == list(alone.share(step)) == list(alone.step(step))


@given(lengths, batch_sizes, sizes)
def test_an_evaluation_is_a_partition_of_the_data_set(length, batch_size, size):
    team = plans(length, batch_size, size)
    seen = [p for step in range(len(team[0])) for plan in team for p in plan.share(step)]
    assert seen == list(range(length))


@given(lengths, batch_sizes)
def test_the_number_of_steps_counts_the_incomplete_batch_only_where_it_is_kept(length, batch_size):
    assert len(Plan(length, batch_size, drop_last=True)) == length // batch_size
    assert len(Plan(length, batch_size, drop_last=False)) == math.ceil(length / batch_size)


@given(lengths, batch_sizes)
def test_all_steps_but_an_incomplete_last_one_are_whole(length, batch_size):
    plan = Plan(length, batch_size, drop_last=True)
    assert all(len(plan.step(step)) == batch_size for step in range(len(plan)))


@given(lengths.filter(bool), batch_sizes, sizes)
def test_a_step_leaves_a_rank_empty_exactly_if_a_share_is_empty(length, batch_size, size):
    team = plans(length, batch_size, size)
    for step in range(len(team[0])):
        some_empty = any(len(plan.share(step)) == 0 for plan in team)
        assert {plan.leaves_some_empty(step) for plan in team} == {some_empty}


@pytest.mark.parametrize(("count", "empty"), [(2, True), (3, False), (4, False)])
def test_as_many_samples_as_ranks_leave_nobody_empty(count, empty):
    assert Plan(count, 8, drop_last=False, size=3).leaves_some_empty(0) is empty


@given(st.integers(0, 2000), seeds, epochs)
def test_a_shuffle_is_a_bijection(length, seed, epoch):
    assert sorted(shuffled(length, seed, epoch)) == list(range(length))


@given(seeds, epochs)
def test_a_shuffle_differs_by_epoch_and_by_seed_and_not_by_call(seed, epoch):
    order = shuffled(50, seed, epoch)
    assert order == shuffled(50, seed, epoch)
    assert order != shuffled(50, seed, epoch + 1)
    assert order != shuffled(50, seed + 1, epoch)


def test_the_next_seed_is_not_the_next_epoch():
    orders = [tuple(shuffled(50, seed, epoch)) for seed in range(20) for epoch in range(20)]
    assert len(set(orders)) == 400


def test_a_shuffle_is_fair():
    # Where each of 8 samples stands, over 4000 epochs: chi-squared with 49 degrees of freedom is
    # above 85.35 once in a thousand, and the seed is fixed.
    counts = [[0] * 8 for _ in range(8)]
    for epoch in range(4000):
        for position, sample in enumerate(shuffled(8, 7, epoch)):
            counts[position][sample] += 1
    assert sum((n - 500) ** 2 / 500 for row in counts for n in row) < 85.35


def test_golden_values_of_the_order():
    # A run that goes on under a newer release must go on in the same order.
    assert shuffled(10, seed=0, epoch=0) == [2, 1, 7, 8, 6, 0, 3, 5, 9, 4]
    assert shuffled(10, seed=0, epoch=1) == [6, 8, 2, 4, 1, 7, 5, 3, 9, 0]
    assert shuffled(10, seed=1, epoch=0) == [5, 4, 6, 2, 0, 8, 3, 7, 9, 1]


def test_golden_values_of_the_hash():
    # The first is SplitMix64's first output for seed 0, halved: 0xE220A8397B1DCDAF >> 1.
    assert mix(0) == 0xE220A8397B1DCDAF >> 1
    assert mix(0, 0) == 6017775124710473527
    assert mix(1, 2, 3) == 3851293329796251419


@given(st.lists(st.integers(), min_size=1, max_size=4))
def test_a_hash_has_63_bits_and_is_a_seed_for_torch(numbers):
    assert 0 <= mix(*numbers) < 2**63


def test_a_hash_depends_on_every_number_and_on_their_order():
    hashes = [mix(a, b, c) for a in range(12) for b in range(12) for c in range(12)]
    assert len(set(hashes)) == 12**3


@given(st.integers(0, 2**64 - 1), st.integers(0, 63))
def test_one_bit_of_the_seed_changes_many_of_the_hash(seed, bit):
    assert 10 <= (mix(seed) ^ mix(seed ^ (1 << bit))).bit_count() <= 54
