"""Seeds: of the run, of loaders that get none, and seeds that are made of other numbers."""

from dataclasses import dataclass
from itertools import count
from weakref import WeakValueDictionary


@dataclass
class RunSeed:
    """The seed from which each microbatch draws its random numbers.

    Attributes:
        seed: that `seed_everything` was given; None if it was not called.
        calls: how often, since then, `backward` was given a batch of which no loader says more.
    """

    seed: int | None = None
    calls: int = 0


run_seed = RunSeed()

# The loaders in use that got a default seed, by PyTorch's initial seed and their number. A loader
# that is gone leaves its number to the next one: so a second run in one process has the same
# loaders.
loaders: dict[int, WeakValueDictionary[int, object]] = {}


def next_index(initial: int) -> int:
    """Return the lowest number that no loader in use has."""
    taken = set(loaders.get(initial) or ())
    return next(number for number in count() if number not in taken)


def register_loader(initial: int, number: int, loader: object) -> None:
    """Let a loader have its number, as long as it is in use."""
    loaders.setdefault(initial, WeakValueDictionary())[number] = loader


def default_seed(initial: int, number: int) -> int:
    """Return the seed of loader `number` of a run, of which the first has the run's own."""
    return mix(initial, number) if number else initial


def mix(*numbers: int) -> int:
    """Hash integers into one of 63 bits; neighbours (seed, seed + 1) have nothing in common.

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
