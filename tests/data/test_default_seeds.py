"""Loaders without a seed of their own: each has another one, and the same one in each run."""

import gc

import pytest
import torch
import torch.distributed as dist
from common_data import Numbers, at, flat, joined, steps
from on_ranks import run

from pardata import make_loader, seed_everything


def shuffled(**options):
    return make_loader(Numbers(20), 4, **{"shuffle": True, "num_workers": 0, **options})


def orders(count=3, **options):
    """Return the first epoch of so many loaders, made one after another."""
    made = [shuffled(**options) for _ in range(count)]
    return [flat(steps(loader)) for loader in made]


@pytest.fixture(autouse=True)
def _seeded():
    state = torch.get_rng_state()
    seed_everything(5)
    yield
    seed_everything(0)
    torch.set_rng_state(state)


def test_no_two_loaders_go_through_the_data_in_lock_step():
    found = orders()
    assert len({tuple(order) for order in found}) == 3
    assert found[0] == orders(1, seed=5)[0]  # the first has the seed of the run


def test_a_run_that_is_seeded_again_is_the_same_run():
    first = orders()
    seed_everything(5)
    assert orders() == first
    seed_everything(6)
    assert orders() != first


def test_seeded_and_invalid_loaders_do_not_change_default_seeds():
    expected = orders(2)
    seed_everything(5)
    first, other = shuffled(), shuffled(seed=9)
    with pytest.raises(ValueError, match="batch_size"):
        make_loader(range(4), 0)
    second = shuffled()
    assert [flat(steps(loader)) for loader in (first, second)] == expected
    assert flat(steps(other)) not in expected


def test_a_loader_that_is_gone_keeps_its_seed():
    expected = orders(2)
    seed_everything(5)
    found = orders(1)
    gc.collect()
    assert found + orders(1) == expected


# --- on ranks ---


def _uneven_counts():
    seed_everything(5, per_rank=True)
    shared = orders(1)
    for _ in range(dist.get_rank()):  # of this rank alone
        make_loader(range(4), 2, distributed=False, num_workers=0)
    return [*shared, *orders(2)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ranks_take_the_seed_and_the_number_of_rank_0(size):
    found = run(_uneven_counts, world_size=size)
    whole = [sorted(flat(shares)) for shares in zip(*found, strict=True)]
    assert whole == [[*range(20)]] * 3


def _with_private_loaders(rank):
    """Return the orders of a loader of all ranks and of one of each, after two of `rank` alone."""
    seed_everything(5)
    for _ in range(2 if dist.get_rank() == rank else 0):
        shuffled(distributed=False)
    return orders(1), orders(1, distributed=False)


def test_a_loader_of_one_rank_does_not_change_the_others_seeds():
    expected = run(_with_private_loaders, None, world_size=2)
    assert run(_with_private_loaders, 1, world_size=2) == expected
    assert expected[0][1] == expected[1][1]
    found = run(_with_private_loaders, 0, world_size=2)  # all take the number of rank 0
    assert found != expected
    assert found[0][1] == found[1][1]


def _orders():
    seed_everything(5)
    return [steps(loader) for loader in [shuffled(), shuffled()]]


def test_they_are_the_same_at_every_world_size():
    alone = _orders()
    for size in (2, 3):
        assert [
            joined(ranks) for ranks in zip(*run(_orders, world_size=size), strict=True)
        ] == alone


# --- resuming ---


def _resume(before, state):
    """Make the loader of the run anew, with so many made before it, and go on."""
    seed_everything(5)
    for _ in range(before):
        make_loader(range(4), 2, num_workers=0)
    loader = shuffled()
    loader.load_state_dict(state)
    return steps(loader), loader.state_dict()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_loads_into_another_loader_of_the_run(workers):
    make_loader(range(4), 2, num_workers=0)
    loader = shuffled(num_workers=workers)
    whole = [steps(loader) for _ in range(2)]
    at(loader, 0)
    for step, _ in enumerate(loader):
        if step == 1:
            break
    state = loader.state_dict()
    for before in (0, 1, 3):  # as when an evaluation runs first, or a cell of a notebook runs again
        for size in (1, 2):
            ranks = run(_resume, before, state, world_size=size)
            assert joined([found for found, _ in ranks]) == whole[0][2:]
            assert {after["seed"] for _, after in ranks} == {state["seed"]}
    again = shuffled(num_workers=2, persistent_workers=True)
    steps(again)  # its workers live on
    again.load_state_dict(state)
    assert [steps(again), steps(again)] == [whole[0][2:], whole[1]]
