"""The random numbers of a microbatch, as dropout's: its own seed decides them on any rank."""

from functools import lru_cache
from typing import Any

import torch

from pardata.data._microbatches import Microbatches
from pardata.environment._world import is_alone, world
from pardata.rng._seeds import mix, run_seed


def microbatch_seed(batch: Any, number: int = 0) -> int:
    """Return the seed of microbatch `number` of a step, the same at every world size.

    Another in each run of the step. What is no `Microbatches` has another with each call, and on
    each rank.
    """
    if isinstance(batch, Microbatches):
        seed = batch.seed if run_seed.seed is None else run_seed.seed
        again = [batch.runs] if batch.runs else []
        return mix(_mixed(seed, batch.epoch) + batch.step, number, *again)
    run_seed.calls += 1
    seed = torch.default_generator.initial_seed() if run_seed.seed is None else run_seed.seed
    rank = 0 if is_alone() else world().rank
    return _mixed(seed, rank) + run_seed.calls


def count_run(batch: Any) -> None:
    """Let the next call on these microbatches draw other numbers: this one has ended well."""
    if isinstance(batch, Microbatches):
        batch.runs += 1


@lru_cache(maxsize=16)
def _mixed(*numbers: int) -> int:
    """Mix what stays the same for a while: that takes microseconds of a step."""
    return mix(*numbers, *b"noise")
