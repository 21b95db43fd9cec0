"""Seeds made of other numbers: the one hash that everything random begins with."""


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
