"""The run's seed, default seeds of loaders, and the hash that derives seeds."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass
class RunSeed:
    """The seed from which each microbatch draws its random numbers.

    Attributes:
        seed: the argument of `seed_everything`; None if it was not called.
        calls: number of calls of `backward` since then with a batch that is no `Microbatches`.
    """

    seed: int | None = None
    calls: int = 0


run_seed = RunSeed()

# By PyTorch's initial seed, how many loaders have taken a default seed since `seed_everything`.
loader_counts = Counter[int]()


def default_seed(initial: int, number: int) -> int:
    """Return the seed of loader `number` of a run; the first loader has PyTorch's initial seed."""
    return mix(initial, number) if number else initial


def mix(*numbers: int) -> int:
    """Hash integers into one of 63 bits, so that seeds derived from neighbors are unrelated.

    SplitMix64's finalizer, once a number: Steele, Lea and Flood, "Fast Splittable Pseudorandom
    Number Generators", OOPSLA 2014.
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1


@lru_cache(maxsize=16)  # its arguments repeat, and `mix` takes microseconds of a step
def noise_seed(*numbers: int) -> int:
    """Return the hash of integers for dropout, unlike the hashes for orders and samples."""
    return mix(*numbers, *b"noise")


def microbatch_seed(batch: Any, number: int) -> int:
    """Return the seed of microbatch `number` of `Microbatches`, the same at every world size.

    It depends on the step and on the number of calls of `backward` with it.
    """
    seed = batch.seed if run_seed.seed is None else run_seed.seed
    return mix(noise_seed(seed, batch.epoch) + batch.step, number, *filter(None, [batch.calls]))
