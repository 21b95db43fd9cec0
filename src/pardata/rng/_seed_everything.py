"""`seed_everything`: seed all default generators."""

import os
from typing import Any

import torch

from pardata._validation import check_bool, check_int
from pardata.environment._world import require_world
from pardata.rng._rng_state import seed_generators
from pardata.rng._seeds import loaders, mix, run_seed


def seed_everything(seed: int, *, per_rank: bool = False, deterministic: bool = False) -> int:
    """Seed Python's, NumPy's (if installed) and PyTorch's generators, on all devices.

    It returns the seed that was used. Not collective. One call, before the model is built, is
    enough. `backward` draws a model's random numbers, for example for dropout, from seeds made of
    this one, which differ between ranks. The loader seeds its order and workers from its own seed.

    Args:
        seed: 0 to 2**63 - 1. Equal on all ranks, so that they build equal models.
        per_rank: mix the rank in, for what you draw yourself and must differ between ranks. In a
            loop that runs ``loss.backward()`` that is dropout too. In a single process the rank is
            0.
        deterministic: also ask PyTorch for deterministic algorithms (an operation that has none
            then raises), but not to fill uninitialised memory, and switch cuDNN's autotuning off.
            Slower on a GPU.

    Raises:
        TypeError, ValueError: the seed is no integer or out of range, or a flag is no bool.

    >>> seed_everything(0)
    0
    """
    seed = check_int("seed", seed)
    if not 0 <= seed < 2**63:
        raise ValueError(f"`seed` must be between 0 and 2**63 - 1, but is {seed}")
    check_bool("per_rank", per_rank)
    check_bool("deterministic", deterministic)
    loaders.clear()
    run_seed.seed, run_seed.calls = seed, 0  # without the rank, which `backward` mixes in
    if per_rank:
        seed = mix(seed, require_world("seed_everything(per_rank=True)").rank)
    seed_generators(seed)
    torch.manual_seed(seed)  # seeds every device
    if deterministic:
        # cuBLAS reads it when it starts; see torch.use_deterministic_algorithms.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # PyTorch would otherwise fill each uninitialised tensor, with one kernel for each.
        deterministic_settings: Any = torch.utils.deterministic
        deterministic_settings.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
    return seed
