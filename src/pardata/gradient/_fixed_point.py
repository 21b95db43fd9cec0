"""Sums of floating-point numbers that are the same to the last bit in any order and grouping.

Each number is rounded once, to a fixed point, and then only integers are added, which are
associative: Demmel and Nguyen, "Parallel Reproducible Summation", IEEE Transactions on Computers
64(7), 2015, discuss this and other ways. A word of 64 bits holds its multiple of 2**-62: enough for
numbers up to 1, which gradients are nearly always, each off by 2**-63 at most, one of 1e-9 by 1e-10
of itself. What is larger takes a second word, the multiple of 2**-16, and leaves the rest to the
first. No scale depends on the numbers: it would be one more thing that differs between runs.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

# Of weighted numbers whose weights sum to one, none beyond this needs the high word.
SMALL = 1.0
# Likewise, none may be beyond this: then no sum can wrap.
LARGEST = 2.0**46
# Numbers in a sum: of each that is large, up to 2**45 is left to the low word.
MOST = 2**15

_LOW, _HIGH = 2.0**62, 2.0**16
_BLOCK = 2**16  # numbers at a time: their float64 stay in a core's cache
_BLOCK_ON_GPU = 2**24  # likewise: enough to keep it busy, and 128 MiB for each result in between


def add(
    numbers: Tensor,
    weight: float,
    low: Tensor,
    high: Tensor | None = None,
    is_large: Tensor | None = None,
    *,
    is_first: bool = False,
) -> None:
    """Add ``weight * numbers``, rounded once in float64 and once to the fixed point, to words.

    Args:
        numbers: n of any shape and floating dtype; a complex one is two. What is not finite, or
            beyond `LARGEST`, makes words of no meaning: look at `largest` first, or after.
        weight: of all of them.
        low: int64, of shape (n,).
        high: likewise; may be missing where none of the numbers is beyond `SMALL`.
        is_large: without dimensions; where it is false, `high` is left alone. So that the same
            words are made where a look at the numbers would wait for a GPU.
        is_first: whether `low` holds nothing yet: it is set, whatever is there.
    """
    flat = _real(numbers.detach()).reshape(-1)
    size = min(_block_size(flat), len(flat))
    # The same memory for each block: what was just written there is still in the cache.
    scaled = torch.empty(size, dtype=torch.float64, device=flat.device)
    words = torch.empty(size, dtype=torch.int64, device=flat.device)
    for block in _blocks(flat):
        part = flat[block]
        # A copy, also of float64: what is added is left as it is. To scale by a power of two is
        # exact, so the only rounding is that of the weighted number.
        rest = scaled[: len(part)].copy_(part).mul_(weight * _LOW)
        if high is not None:
            multiple = (rest * (_HIGH / _LOW)).round_()
            if is_large is not None:
                multiple.mul_(is_large)
            high[block].add_(multiple.long())
            # Exact: both have few bits, the difference fewer.
            rest.sub_(multiple, alpha=_LOW / _HIGH)
        rest.round_()
        if is_first:
            low[block].copy_(rest)
        else:
            low[block].add_(words[: len(part)].copy_(rest))


def largest(numbers: Tensor) -> Tensor:
    """Return the largest magnitude, in float64 and without dimensions; NaN if any is."""
    if not numbers.numel():
        return torch.zeros((), dtype=torch.float64, device=numbers.device)
    least, greatest = _real(numbers.detach()).aminmax()  # thirty times as fast as the norm
    return torch.maximum(-least, greatest).double()


def value(low: Tensor, high: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Return the sums, computed in float64.

    Args:
        low: of shape (n,).
        high: likewise; where it is missing, nothing was added to it.
        out: filled and returned: n numbers of any shape, layout and floating dtype; a complex one
            is two. A new one is float64.
    """
    target = torch.empty_like(low, dtype=torch.float64) if out is None else out
    numbers = _real(target)
    is_flat = numbers.is_contiguous()
    sums = numbers.view(-1) if is_flat else torch.empty_like(low, dtype=torch.float64)
    for block in _blocks(sums):
        part = low[block].double().mul_(1 / _LOW)
        if high is not None:
            part.add_(high[block].double(), alpha=1 / _HIGH)
        sums[block] = part
    if not is_flat:
        numbers.copy_(sums.view(numbers.shape))
    return target


def _real(numbers: Tensor) -> Tensor:
    return torch.view_as_real(numbers) if numbers.is_complex() else numbers


def _block_size(flat: Tensor) -> int:
    return _BLOCK_ON_GPU if flat.is_cuda else _BLOCK


def _blocks(flat: Tensor) -> Iterator[slice]:
    """Yield parts of `flat`, for what is computed in between must not take its size in memory."""
    size = _block_size(flat)
    for start in range(0, len(flat), size):
        yield slice(start, start + size)
