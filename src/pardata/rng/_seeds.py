"""The run's seed, default seeds of loaders, and the hash that derives seeds."""

from dataclasses import dataclass
from itertools import count
from weakref import WeakValueDictionary


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

# The live loaders with a default seed, by PyTorch's initial seed and their number. A new loader
# gets the number of one that was garbage-collected, so a second run in one process has the same
# seeds.
loaders: dict[int, WeakValueDictionary[int, object]] = {}


def next_index(initial: int) -> int:
    """Return the lowest number that no live loader has."""
    taken = set(loaders.get(initial) or ())
    return next(number for number in count() if number not in taken)


def register_loader(initial: int, number: int, loader: object) -> None:
    """Give a loader its number, as long as it lives."""
    loaders.setdefault(initial, WeakValueDictionary())[number] = loader


def default_seed(initial: int, number: int) -> int:
    """Return the seed of loader `number` of a run; the first loader has PyTorch's initial seed."""
    return mix(initial, number) if number else initial


def mix(*numbers: int) -> int:
    """Hash integers into one of 63 bits, so that seeds derived from neighbours are unrelated.

    SplitMix64's finaliser, once a number: Steele, Lea and Flood, "Fast Splittable Pseudorandom
    Number Generators", OOPSLA 2014.
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1
