"""The seeds of loaders that get none: another one for each that is in use, the same in each run."""

from itertools import count
from weakref import WeakValueDictionary

from pardata.rng._splitmix64 import mix

# The loaders in use that got such a seed, by PyTorch's initial seed and their number. A loader that
# is gone leaves its number to the next one: so a second run in one process has the same loaders.
loaders: dict[int, WeakValueDictionary[int, object]] = {}


def next_number(initial: int) -> int:
    """Return the lowest number that no loader in use has."""
    taken = set(loaders.get(initial) or ())
    return next(number for number in count() if number not in taken)


def take_number(initial: int, number: int, loader: object) -> None:
    """Let a loader have its number, as long as it is in use."""
    loaders.setdefault(initial, WeakValueDictionary())[number] = loader


def default_seed(initial: int, number: int) -> int:
    """Return the seed of loader `number` of a run, of which the first has the run's own."""
    return mix(initial, number) if number else initial
