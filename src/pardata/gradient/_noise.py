"""The noise of a microbatch, as dropout's: drawn under a seed of its own, whoever runs it."""

from functools import lru_cache
from typing import Any

import torch

from pardata.data._microbatches import Microbatches
from pardata.ranks._process import process
from pardata.ranks._world import is_alone, world
from pardata.seeds._mix import mix


def noise_seed(batch: Any, number: int = 0) -> int:
    """Return the seed of microbatch `number` of a step, the same at every world size.

    What is no `Microbatches` has another with each call, and on each rank.
    """
    if isinstance(batch, Microbatches):
        seed = batch.seed if process.seed is None else process.seed
        return mix(_mixed(seed, batch.epoch) + batch.step, number)
    process.calls += 1
    seed = torch.default_generator.initial_seed() if process.seed is None else process.seed
    rank = 0 if is_alone() else world().rank
    return _mixed(seed, rank) + process.calls


@lru_cache(maxsize=16)
def _mixed(*numbers: int) -> int:
    """Mix what stays the same for a while: that takes microseconds of a step."""
    return mix(*numbers, *b"noise")
