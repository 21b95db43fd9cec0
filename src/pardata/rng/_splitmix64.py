"""Seeds made of other numbers: the one hash that everything random begins with."""

from collections.abc import Iterable


def mix(*numbers: int) -> int:
    """Hash integers into one of 63 bits; neighbours (seed, seed + 1) have nothing in common.

    SplitMix64's finaliser, once a number: Steele, Lea and Flood, "Fast Splittable Pseudorandom
    Number Generators", OOPSLA 2014.
    """
    return _state(numbers) >> 1


def mixed(first: int, others: Iterable[int]) -> list[int]:
    """Return ``mix(first, other)`` for each of `others`, in less time."""
    begun = _state((first,))
    return [_state((other,), begun) >> 1 for other in others]


def _state(numbers: Iterable[int], state: int = 0) -> int:
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state
