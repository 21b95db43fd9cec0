"""The arithmetic of orders, steps and shares, for all sizes."""

import math

from hypothesis import given
from hypothesis import strategies as st

from pardata.data._plan import Plan, share
from pardata.seeds._mix import mix

lengths = st.integers(0, 300)
batch_sizes = st.integers(1, 64)
sizes = st.integers(1, 17)


def plans(length, batch_size, size, *, drop_last=False, microbatch_size=None):
    return [
        Plan(length, batch_size, drop_last, microbatch_size, rank, size) for rank in range(size)
    ]


def own(plan, step):
    """Return this rank's positions in a step."""
    return [position for part in plan.parts(step) for position in part]


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
        together = [position for plan in team for position in own(plan, step)]
        assert together == own(alone, step) == list(alone.step(step))


@given(lengths, batch_sizes, sizes)
def test_without_microbatches_each_rank_has_one_run_of_about_the_same_length(
    length, batch_size, size
):
    team = plans(length, batch_size, size)
    for step in range(len(team[0])):
        shares = [plan.parts(step) for plan in team]
        assert {len(share) for share in shares} == {1}
        counts = [len(run) for (run,) in shares]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] - counts[-1] <= 1
        assert {plan.microbatches(step) for plan in team} == {range(1)}
        assert {plan.counts(step) for plan in team} == {(sum(counts),)}


@given(lengths, batch_sizes, sizes)
def test_an_evaluation_is_a_partition_of_the_data_set(length, batch_size, size):
    team = plans(length, batch_size, size)
    seen = [p for step in range(len(team[0])) for plan in team for p in own(plan, step)]
    assert seen == list(range(length))


@given(lengths, batch_sizes)
def test_the_number_of_steps_counts_the_incomplete_batch_only_where_it_is_kept(length, batch_size):
    assert len(Plan(length, batch_size, drop_last=True)) == length // batch_size
    assert len(Plan(length, batch_size, drop_last=False)) == math.ceil(length / batch_size)


@given(lengths, batch_sizes)
def test_all_steps_but_an_incomplete_last_one_are_whole(length, batch_size):
    plan = Plan(length, batch_size, drop_last=True)
    assert all(len(plan.step(step)) == batch_size for step in range(len(plan)))


# --- microbatches ---


@st.composite
def cut_plans(draw):
    """Draw the plans of all ranks, with microbatches."""
    length, batch_size, size = draw(lengths), draw(batch_sizes), draw(sizes)
    microbatch_size, drop_last = draw(st.integers(1, batch_size)), draw(st.booleans())
    return plans(length, batch_size, size, drop_last=drop_last, microbatch_size=microbatch_size)


@given(cut_plans())
def test_microbatches_are_the_same_pieces_of_the_step_at_every_world_size(team):
    alone = plans(
        team[0].length,
        team[0].batch_size,
        1,
        drop_last=team[0].drop_last,
        microbatch_size=team[0].microbatch_size,
    )[0]
    for step in range(len(alone)):
        together = [part for plan in team for part in plan.parts(step)]
        assert together == alone.parts(step)
        assert [position for part in together for position in part] == list(alone.step(step))


@given(cut_plans())
def test_all_microbatches_are_whole_but_the_last_of_a_step_which_has_the_rest(team):
    size = team[0].microbatch_size
    for step in range(len(team[0])):
        (counts,) = {plan.counts(step) for plan in team}
        assert counts == tuple(len(part) for plan in team for part in plan.parts(step))
        assert set(counts[:-1]) <= {size}
        assert 1 <= counts[-1] <= size
        assert len(counts) == math.ceil(len(team[0].step(step)) / size)


@given(cut_plans())
def test_a_rank_has_a_run_of_whole_microbatches_about_as_many_as_any_other(team):
    for step in range(len(team[0])):
        numbers = [plan.microbatches(step) for plan in team]
        assert [n for own_numbers in numbers for n in own_numbers] == list(
            range(len(team[0].counts(step)))
        )
        held = [len(own_numbers) for own_numbers in numbers]
        assert held == sorted(held, reverse=True)
        assert held[0] - held[-1] <= 1
        assert held == [len(plan.parts(step)) for plan in team]


@given(cut_plans())
def test_with_microbatches_a_rank_without_any_has_no_part_and_no_share_is_empty(team):
    for plan in team:
        for step in range(len(plan)):
            assert all(len(part) > 0 for part in plan.parts(step))


@given(cut_plans())
def test_what_stands_in_is_the_first_microbatch_of_the_step_on_every_rank(team):
    for step in range(len(team[0])):
        assert {plan.stand_in(step) for plan in team} == {team[0].parts(step)[0]}


@given(lengths, batch_sizes, sizes)
def test_without_microbatches_the_first_sample_stands_in_on_every_rank(length, batch_size, size):
    team = plans(length, batch_size, size)
    for step in range(len(team[0])):
        first = team[0].step(step)[0]
        assert {plan.stand_in(step) for plan in team} == {range(first, first + 1)}


def test_an_example_of_microbatches():
    # 11 samples, global batches of 8, microbatches of 3, on two ranks.
    one, other = plans(11, 8, 2, microbatch_size=3)
    assert one.counts(0) == other.counts(0) == (3, 3, 2)
    assert one.parts(0) == [range(3), range(3, 6)]
    assert other.parts(0) == [range(6, 8)]
    assert (one.microbatches(0), other.microbatches(0)) == (range(2), range(2, 3))
    assert one.counts(1) == (3,)
    assert one.parts(1) == [range(8, 11)]
    assert other.parts(1) == []
    assert (one.microbatches(1), other.microbatches(1)) == (range(1), range(1, 1))


# --- the hash ---


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
