"""A random permutation of any length, computed position by position in constant memory.

It uses integer arithmetic only, so it is the same on every platform, thread count and torch
version.
"""

import math

import torch
from torch import Tensor

from pardata.rng._seeds import mix

# Up to this length the permutation is drawn by sorting, in a millisecond and half a megabyte,
# because a Feistel network on a few bits reaches only some permutations.
_DRAWN = 2**16
_ROUNDS = 8
# The mask of 31-bit words, whose product with a constant below 2**32 fits in int64.
_WORD = 2**31 - 1


class Shuffle:
    """A random permutation of 0 … `length` - 1, decided by `key`.

    It takes constant memory, whatever the length. Above 65,536 a generalized Feistel network of 8
    rounds finds a number from its position. It works on a grid of rows and columns that is just
    large enough, and walks until the number is in range. These are methods 2 and 3 of Black and
    Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.

    >>> Shuffle(5, key=1).at(torch.arange(5)).sort().values
    tensor([0, 1, 2, 3, 4])
    """

    def __init__(self, length: int, key: int) -> None:
        self._length = length
        self._keys = [mix(key, number) & _WORD for number in range(_ROUNDS)]
        self._columns = math.isqrt(max(length - 1, 0)) + 1
        self._rows = -(-length // self._columns)
        self._drawn = None
        if length <= _DRAWN:
            words = random_words(torch.arange(length, device="cpu"), key)
            self._drawn = words.argsort(stable=True)

    def at(self, positions: Tensor) -> Tensor:
        """Return the numbers at `positions`; both are int64 tensors of shape (n,)."""
        if self._drawn is not None:
            return self._drawn[positions]
        numbers = self._permuted(positions)
        while (outside := numbers >= self._length).any():
            numbers[outside] = self._permuted(numbers[outside])
        return numbers

    def _permuted(self, cells: Tensor) -> Tensor:
        """Return the Feistel permutation of cells of the grid; both are int64 of shape (n,)."""
        sides = [cells // self._columns, cells % self._columns]
        extents = self._rows, self._columns
        for number, key in enumerate(self._keys):
            one, other = number % 2, (number + 1) % 2
            # 31 random bits times the extent, shifted right by 31, are a number below the extent.
            sides[one] += _scrambled(sides[other], key) * extents[one] >> 31
            sides[one] -= (sides[one] >= extents[one]) * extents[one]
        return sides[0] * self._columns + sides[1]


def random_words(numbers: Tensor, key: int) -> Tensor:
    """Return 62 random bits for each of `numbers`; both are int64 tensors of shape (n,)."""
    first, second, third, fourth = (mix(key, number) & _WORD for number in range(4))
    high = _scrambled(_scrambled(numbers, first), second)
    return high * 2**31 + _scrambled(_scrambled(numbers, third), fourth)


def _scrambled(words: Tensor, key: int) -> Tensor:
    """Return a 31-bit hash of each of `words`, int64 of shape (n,), by two multiply-shift rounds.

    The constants are from Wellons' "Prospecting for hash functions", 2018, here modulo 2**31.
    """
    words = words ^ key
    words ^= words >> 15
    words *= 0x7FEB352D
    words &= _WORD
    words ^= words >> 14
    words *= 0x846CA68B
    words &= _WORD
    words ^= words >> 16
    return words
