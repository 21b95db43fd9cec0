"""One seed for all generators."""

import os
import random
import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import run_caught

from pardata import seed_everything, world
from pardata.seeds._generators import default_generators, numpy_or_none
from pardata.seeds._mix import mix


@pytest.fixture(autouse=True)
def _numpy_as_before():
    state = np.random.get_state()  # noqa: NPY002  # the generator that is seeded
    yield
    np.random.set_state(state)  # noqa: NPY002  # as above


def draw():
    """Draw from every generator that is seeded."""
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002  # as above


@given(st.integers(0, 2**63 - 1))
def test_the_same_seed_gives_the_same_numbers_everywhere(seed):
    assert seed_everything(seed) == seed
    first = draw()
    assert torch.initial_seed() == seed
    assert seed_everything(seed) == seed
    assert draw() == first


def test_the_numbers_are_those_of_the_generators_own_seeding():
    seed_everything(7)
    ours = draw()
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002  # as above
    torch.manual_seed(7)
    assert draw() == ours


def test_different_seeds_give_different_numbers():
    seen = set()
    for seed in (0, 1, 2**32 - 1, 2**63 - 2):  # torch's CPU generator takes the low 32 bits
        seed_everything(seed)
        seen.add(torch.rand(1).item())
        seen.add(random.random())
    assert len(seen) == 8


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused_before_anything_is_seeded(seed):
    before = torch.initial_seed()
    fragment = f"`seed` must be between 0 and 2**63 - 1, but is {seed}"
    with pytest.raises(ValueError, match=re.escape(fragment)):
        seed_everything(seed)
    assert torch.initial_seed() == before


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_the_first_and_the_last_seed_are_accepted(seed):
    assert seed_everything(seed) == seed


@pytest.mark.parametrize("seed", [1.0, "1", None, True, torch.tensor(1)])
def test_what_is_no_integer_is_refused(seed):
    fragment = f"`seed` must be an integer, but is {seed!r}"
    with pytest.raises(TypeError, match=re.escape(fragment)):
        seed_everything(seed)


def seed_ranks(per_rank):
    return seed_everything(5, per_rank=per_rank), draw()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_get_equal_numbers_and_with_per_rank_each_its_own(size):
    equal = run_caught(seed_ranks, False, world_size=size)
    assert equal == [equal[0]] * size
    assert equal[0][0] == 5
    own = run_caught(seed_ranks, True, world_size=size)
    assert [seed for seed, _ in own] == [mix(5, rank) for rank in range(size)]
    assert len({numbers for _, numbers in own}) == size


def test_per_rank_in_a_single_process_is_rank_0():
    assert seed_everything(5, per_rank=True) == mix(5, 0)
    assert 0 <= mix(5, 0) < 2**63


def seed_alone():
    # No collective hides in it: one rank may seed while the other does not.
    return seed_everything(1, per_rank=True) if world().rank == 0 else None


def test_seeding_is_not_collective():
    assert run_caught(seed_alone, world_size=2) == [mix(1, 0), None]


def test_deterministic_asks_torch_for_it(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        seed_everything(0)
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.benchmark
        seed_everything(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        seed_everything(0, deterministic=True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def _without_numpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)  # makes `import numpy` fail
    for asked_once in (numpy_or_none, default_generators):
        asked_once.cache_clear()
    yield
    monkeypatch.undo()
    for asked_once in (numpy_or_none, default_generators):
        asked_once.cache_clear()


@pytest.mark.usefixtures("_without_numpy")
def test_without_numpy_the_others_are_seeded():
    before = np.random.get_state()[1].tolist()  # noqa: NPY002  # as above
    seed_everything(3)
    first = random.random(), torch.rand(1).item()
    seed_everything(3)
    assert (random.random(), torch.rand(1).item()) == first
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002  # as above
