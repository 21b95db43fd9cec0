"""Sums of floating-point numbers that are the same to the last bit in any order and grouping.

Each number is rounded once, to a fixed point, and then only integers are added, which are
associative: Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Transactions on Computers
64(7), 2015, discuss this and other ways. Two words of 64 bits hold a number: its multiple of
2**-20, and of the rest that of 2**-68. So a sum reaches to 2**42, and each number is off by 2**-69
at most: one of 1e-9 by 2e-12 of itself. No scale depends on the numbers: it would be one more thing
that differs between runs.
"""

import torch
from torch import Tensor

LARGEST = 2.0**42
"""Of weighted numbers whose weights sum to one, none beyond this: then no sum can wrap."""

MOST = 2**15
"""Numbers in a sum: each adds up to 2**47 to the lower word."""

_HIGH = 2.0**20
_LOW = 2.0**68
_BLOCK = 2**14  # numbers at a time: their float64 stay in a core's cache


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
    size = len(flat) if flat.is_cuda else _BLOCK
    for start in range(0, len(flat), max(size, 1)):
        # A copy, also of float64: what is added is left as it is.
        rest = flat[start : start + size].to(torch.float64, copy=True).mul_(weight)
        high = (rest * _HIGH).round_()
        words[0, start : start + size] += high.long()
        rest -= high.mul_(1 / _HIGH)  # exact: both have few bits, and the difference fewer
        words[1, start : start + size] += rest.mul_(_LOW).round_().long()


def largest(numbers: Tensor) -> Tensor:
    """Return the largest magnitude, in float64 and without dimensions; NaN if any is."""
    if not numbers.numel():
        return torch.zeros((), dtype=torch.float64, device=numbers.device)
    norm: Tensor = torch.linalg.vector_norm(numbers.detach(), float("inf"))
    return norm.double()


def value(words: Tensor) -> Tensor:
    """Return the sums as float64."""
    high, low = words[0].double(), words[1].double()
    return high.mul_(1 / _HIGH).add_(low, alpha=1 / _LOW)
