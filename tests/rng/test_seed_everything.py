"""One seed for all generators."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import run_caught

from pardata import seed_everything
from pardata.rng._seeds import mix


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


def test_deterministic_asks_torch_for_it(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        seed_everything(0)
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.benchmark
        seed_everything(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert not torch.utils.deterministic.fill_uninitialized_memory  # a kernel for each tensor
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        seed_everything(0, deterministic=True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        torch.use_deterministic_algorithms(False)
