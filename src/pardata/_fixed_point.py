"""Sums of floating-point numbers that are the same to the last bit in any order and grouping.

Each number is rounded once, to a fixed point, and then only integers are added, which are
associative: Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Transactions on Computers
64(7), 2015, discuss this and other ways. Two words of 64 bits hold a number: its multiple of
2**-20, and of the rest that of 2**-68. So a sum reaches to 2**42, and each number is off by 2**-69
at most: one of 1e-9 by 2e-12 of itself. No scale depends on the numbers: it would be one more thing
that differs between runs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

LARGEST = 2.0**42
"""Of weighted numbers whose weights sum to one, none beyond this: then no sum can wrap."""

MOST = 2**15
"""Numbers in a sum: each adds up to 2**47 to the lower word."""

_SCALES = 2.0**20, 2.0**68  # of the two words
_BLOCK = 2**15  # numbers at a time: their float64 stay in a core's cache

# Beside this a float64 has no place for a fraction, and its last bits are those of an integer.
_SHIFT = 1.5 * 2.0**52
_SHIFT_BITS = int(torch.tensor(_SHIFT, dtype=torch.float64).view(torch.int64))


def zeros(count: int, device: torch.device) -> Tensor:
    """Return the words of `count` sums of nothing: int64, of shape (2, count)."""
    return torch.zeros(2, count, dtype=torch.int64, device=device)


def add(words: Tensor, numbers: Tensor, weight: float) -> None:
    """Add ``weight * numbers``, rounded once in float64 and once to the fixed point, to `words`.

    Args:
        words: of shape (2, n).
        numbers: of n elements and any shape and floating dtype. What is not finite, or beyond
            `LARGEST`, makes words of no meaning: look at `largest` first, or after.
        weight: of all of them.
    """
    flat = numbers.detach().reshape(-1)
    for block in _blocks(flat):
        # A copy, also of float64: what is added is left as it is.
        rest = flat[block].to(torch.float64, copy=True).mul_(weight)
        for word, scale in zip(words, _SCALES, strict=True):
            whole = _add_rounded(word[block], rest * scale)
            rest.sub_(whole, alpha=1 / scale)  # exact: both have few bits, the difference fewer


def largest(numbers: Tensor) -> Tensor:
    """Return the largest magnitude, in float64 and without dimensions; NaN if any is."""
    if not numbers.numel():
        return torch.zeros((), dtype=torch.float64, device=numbers.device)
    least, greatest = numbers.detach().aminmax()  # thirty times as fast as the norm
    return torch.maximum(-least, greatest).double()


def value(words: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the sums, computed in float64, in a floating `dtype`."""
    sums = torch.empty(words.shape[1], dtype=dtype, device=words.device)
    for block in _blocks(sums):
        high, low = words[:, block].double()
        sums[block] = high.mul_(1 / _SCALES[0]).add_(low, alpha=1 / _SCALES[1])
    return sums


def _add_rounded(word: Tensor, numbers: Tensor) -> Tensor:
    """Add `numbers`, rounded to whole ones, to `word`, in place of both; return them."""
    if not _fit_beside_the_shift(numbers):
        word += numbers.round_().long()
        return numbers
    # The same in a third of the time: a processor may have no such conversion of many at once.
    word += numbers.add_(_SHIFT).view(torch.int64)
    word -= _SHIFT_BITS
    return numbers.sub_(_SHIFT)


def _fit_beside_the_shift(numbers: Tensor) -> bool:
    if numbers.is_cuda:  # a look at them would wait for the GPU
        return False
    least, greatest = numbers.aminmax()
    return bool(least > -(2.0**51) and greatest < 2.0**51)  # not where one is NaN


def _blocks(flat: Tensor) -> Iterator[slice]:
    """Yield parts of `flat`; on a GPU it is one."""
    size = max(len(flat), 1) if flat.is_cuda else _BLOCK
    for start in range(0, len(flat), size):
        yield slice(start, start + size)
