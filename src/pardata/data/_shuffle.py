"""A random order that is computed and not stored: any position, at once, of any number of things.

Pure arithmetic on integers, so it is the same on every platform, thread count and torch version.
"""

import math

import torch
from torch import Tensor

from pardata.rng._seeds import mix

# Up to here the whole order is drawn: exactly fair, in a millisecond and half a megabyte. A Feistel
# network on a few bits reaches only some of the orders.
_DRAWN = 2**16
_ROUNDS = 8
_WORD = 2**31 - 1  # words of 31 bits: times a constant below 2**32 they stay within int64


class Shuffle:
    """The numbers 0 … `length` - 1 in a random order that `key` decides.

    It takes constant memory, whatever the length. Above 65,536 a generalised Feistel network of 8
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
        self._drawn = self._draw() if length <= _DRAWN else None

    def at(self, positions: Tensor) -> Tensor:
        """Return what stands at `positions`, an int64 tensor."""
        if self._drawn is not None:
            return self._drawn[positions]
        numbers = self._permuted(positions)
        while (outside := numbers >= self._length).any():
            numbers[outside] = self._permuted(numbers[outside])
        return numbers

    def _draw(self) -> Tensor:
        """Return the whole order: sorted by 62 random bits each, hardly any two of them equal."""
        keys = torch.tensor(self._keys[:4], device="cpu").view(2, 2, 1)
        numbers = torch.arange(self._length, device="cpu")
        words = _scrambled(_scrambled(numbers, keys[:, 0]), keys[:, 1])
        return (words[0] * 2**31 + words[1]).argsort(stable=True)

    def _permuted(self, cells: Tensor) -> Tensor:
        """Return a permutation of the grid's cells, at `cells`."""
        sides = [cells // self._columns, cells % self._columns]
        extents = self._rows, self._columns
        for number, key in enumerate(self._keys):
            one, other = number % 2, (number + 1) % 2
            # 31 random bits times the extent, without the last 31, are a number below the extent.
            sides[one] += _scrambled(sides[other], key) * extents[one] >> 31
            sides[one] -= (sides[one] >= extents[one]) * extents[one]
        return sides[0] * self._columns + sides[1]


def _scrambled(words: Tensor, key: Tensor | int) -> Tensor:
    """Return 31 bits for each of `words`, that look random: the finaliser of a hash, twice mixed.

    Multiply and shift as in Wellons' "Prospecting for hash functions", 2018, here modulo 2**31.
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
