"""Shares of equal cost: the same steps. The cut of one step: test_balanced_ranges.py."""

import math

import pytest
import torch
from common_data import Count, Numbers, joined, loader_of, rows
from on_ranks import run, run_caught
from torch.utils.data import BatchSampler, RandomSampler

from pardata import Microbatches, make_loader, world

LENGTHS = [1 + (number * 37 % 23) ** 2 for number in range(23)]


def with_long(first):
    """Return costs of which the first is as large as all others together."""
    return [first, *[1] * 22]


def shares(cost, options, state=None):
    """Return what this rank gets of two epochs."""
    options = {name: made() if callable(made) else made for name, made in options.items()}
    loader = loader_of(cost=cost, **options)
    if state is not None:
        loader.load_state_dict(state)
    return [rows(batch) for _ in loader.epochs(2) for batch in loader]


def sampler():
    return RandomSampler(range(23))


def batch_sampler():
    return BatchSampler(RandomSampler(range(23)), 10, drop_last=False)


@pytest.mark.parametrize("microbatch_size", [None, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 11, "shuffle": True},
        {"batch_size": 11, "sampler": sampler},
        {"batch_size": None, "batch_sampler": batch_sampler},
    ],
    ids=["shuffle", "sampler", "batch_sampler"],
)
def test_the_steps_are_those_without_cost(options, microbatch_size):
    options = {**options, "microbatch_size": microbatch_size}
    (expected,) = run(shares, None, options, world_size=1)
    even = run(shares, None, options, world_size=3)
    for size in (1, 2, 3):
        found = run(shares, LENGTHS, options, world_size=size)
        assert joined(found) == expected
    assert found != even
    assert run(shares, LENGTHS.__getitem__, options, world_size=3) == found


def first_share(cost, microbatch_size):
    (batch,) = loader_of(23, 23, cost=cost, microbatch_size=microbatch_size)
    if microbatch_size is None:
        return len(batch)
    ranges = batch.ranges
    assert (len(ranges), ranges[world().rank]) == (batch.size, batch.numbers)
    return batch.numbers


def test_a_rank_with_the_costly_sample_gets_fewer():
    assert run(first_share, with_long(22), None) == [1, 22]
    assert run(first_share, with_long(12), None) == [6, 17]
    assert run(first_share, with_long(22), 2) == [range(1), range(1, 12)]
    assert run(first_share, [0] * 23, None) == [12, 11]  # equal numbers, where nothing costs
    # Each rank has at least one, also if the first costs less than a share.
    assert run(first_share, [0] * 22 + [1], None, world_size=3)[1:] == [1, 1]


def test_a_single_process_gets_all():
    assert first_share(LENGTHS, None) == 23


def imbalance(cost):
    loader = make_loader(Numbers(8), 4, cost=cost)
    assert "imbalance" not in loader.stats()  # before the first step
    found = []
    for _ in loader:
        stats = loader.stats()
        found.append((stats["imbalance"], stats["imbalance_by_number"]))
    return found


def test_stats_have_the_largest_share_over_the_mean():
    cost = [6, 1, 1, 2, 1, 1, 2, 2]  # 6 | 4, then 4 | 2 by cost, 7 | 3, then 2 | 4 by number
    assert run(imbalance, cost) == [[(12 / 10, 14 / 10), (20 / 16, 22 / 16)]] * 2
    assert run(imbalance, None) == [[(1, 1), (1, 1)]] * 2


def test_a_sharded_stream_does_not_know_its_imbalance():
    loader = make_loader(Count(8), 4, sharded=True, num_workers=0)
    list(loader)
    assert math.isnan(loader.stats()["imbalance"])


def stopped(cost):
    loader = loader_of(cost=cost, shuffle=True)
    next(iter(loader))
    return loader.state_dict()


def test_a_state_resumes_at_another_size_with_and_without_cost():
    options = {"shuffle": True, "microbatch_size": 2}
    (expected,) = run(shares, None, options, world_size=1)
    state = run(stopped, LENGTHS)[0]
    for cost in (None, LENGTHS, LENGTHS[::-1]):
        assert joined(run(shares, cost, options, state, world_size=3)) == expected[1:]


def changed_afterwards():
    costs = torch.tensor(LENGTHS, dtype=torch.float64)
    loader = loader_of(cost=costs, shuffle=True)
    if world().rank:
        costs.zero_()  # a list that is emptied to free its memory, say
    return [rows(batch) for _ in loader.epochs(2) for batch in loader]


def test_costs_are_those_at_the_call():
    assert run(changed_afterwards) == run(shares, LENGTHS, {"shuffle": True})


def under_meta():
    with torch.device("meta"):
        loader = make_loader(list(range(20)), 10, cost=[9, *[1] * 19], num_workers=0)
        return [batch.tolist() for batch in loader]


def test_costs_are_read_on_the_cpu_under_any_default_device():
    first, second = run(under_meta)
    assert first == [[0], [*range(10, 15)]]
    assert second == [[*range(1, 10)], [*range(15, 20)]]


def differing():
    loader_of(cost=with_long(world().rank))


def test_ranks_with_different_costs_raise_at_the_call():
    for error in run_caught(differing, world_size=2):
        assert error.type == "RuntimeError"
        assert "cost" in error.text


def of_stream():
    make_loader(Count(8), 4, cost=[1] * 8)


def failing():
    loader_of(cost=lambda index: {}[index])


def outside():
    list(loader_of(23, 5, cost=LENGTHS, sampler=[30] * 23))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: loader_of(cost=LENGTHS[:-1]), r"of shape \(23,\), but is of shape \(22,\)"),
        (lambda: loader_of(cost=[-1] * 23), "finite numbers of at least 0.*from -1 up"),
        (lambda: loader_of(cost=[math.nan] * 23), "the sum nan"),
        (lambda: loader_of(cost=[1e308] * 23), "finite"),
        (lambda: loader_of(cost=3), "`cost` must be a sequence of numbers, but is an int"),
        (lambda: loader_of(cost=["a"] * 23), "could not convert string to float"),
        (
            lambda: loader_of(cost=dict.fromkeys(range(23), 1)),
            "but is a dict: pass a list or a tensor",
        ),
        (failing, "`cost` failed: KeyError: 0"),
        (outside, "`sampler` must yield indices below 23"),
        (of_stream, "`cost` must be None for an IterableDataset"),
    ],
)
def test_wrong_costs_are_errors(wrong, text):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
        wrong()


def test_microbatches_made_by_hand_have_ranges_of_equal_number():
    batch = Microbatches([], epoch=0, step=0, first=0, counts=(1, 1, 1), size=2)
    assert (batch.ranges, batch.by_cost) == ((range(2), range(2, 3)), False)
