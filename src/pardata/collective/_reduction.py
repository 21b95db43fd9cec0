"""Reduce and gather numbers, tensors and nested structures of them, in one collective."""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.collective._explanation import explained
from pardata.collective._header import Leaf, Matching, Values
from pardata.ranks._world import World, require_world

_T = TypeVar("_T")

# Whole numbers below this are exact in float64.
_EXACT = 2**53
_CPU = torch.device("cpu")


@overload
def all_reduce_mean(value: float, weight: float | Tensor = 1) -> float: ...


@overload
def all_reduce_mean(value: _T, weight: float | Tensor = 1) -> _T: ...


def all_reduce_mean(value: Any, weight: float | Tensor = 1) -> Any:
    """Return the mean of `value` over all ranks, weighted by each rank's `weight`. Collective.

    `value` is a number, a tensor, or nested dicts, lists and tuples of them; the result has the
    same structure. It takes one collective, or two for more than 57 numbers in all. Sums are in
    float64. Floating-point tensors keep their dtype and device, integer and bool tensors become
    the default floating dtype, numbers become ``float``. The input is not changed and the result
    carries no gradient. In a single process the value itself is the mean.

    Args:
        value: what to average. A number on one rank may be a tensor without dimensions on another.
        weight: how much this rank's value counts, for example its number of samples. With 0 it
            does not count at all, be it NaN.

    Raises:
        TypeError: for a leaf or a weight that is no number; names its path.
        ValueError: for a weight that is negative or not finite, or if all weights are 0.
        RuntimeError: where the structures or shapes differ between ranks, with a table. All
            errors are raised on every rank, and the group is usable afterwards.

    >>> all_reduce_mean({"loss": 0.5, "correct": torch.tensor([3.0, 1.0])}, weight=8)
    {'loss': 0.5, 'correct': tensor([3., 1.])}
    """
    here = require_world("all_reduce_mean")
    matching = Matching(here, "all_reduce_mean", value, _reduced_text)
    number = matching.guarded(lambda: _checked_weight(weight), 0.0)
    if here.size == 1:
        number = float(number > 0)  # alone, the mean is the value, to the last bit
    with explained("all_reduce_mean"):
        sums, total = matching.all_reduce(lambda: _pack(matching, number), number)
    if total == 0:
        raise ValueError(
            "`weight` must be positive on at least one rank, but is 0 on all: nothing was counted"
        )
    means = [part / total for part in _unpacked(matching.leaves, sums)]
    return matching.rebuilt(map(_mean_like, matching.leaves, means))


def all_reduce_sum(value: _T) -> _T:
    """Return the sum of `value` over all ranks. Collective.

    As `all_reduce_mean` in everything but this: there is no weight, and whole numbers stay whole:
    integer and bool tensors become int64, as with ``torch.sum``.

    Raises:
        TypeError: for a leaf that is no number; names its path.
        OverflowError: for whole numbers or a sum of them from 2**53 up, where float64 is no longer
            exact.
        RuntimeError: where the structures or shapes differ between ranks, with a table. All
            errors are raised on every rank, and the group is usable afterwards.

    >>> all_reduce_sum([3, torch.tensor([1.5, 2.5])])
    [3, tensor([1.5000, 2.5000])]
    """
    here = require_world("all_reduce_sum")
    matching = Matching(here, "all_reduce_sum", value, _reduced_text)
    matching.guarded(lambda: _require_exact(matching.leaves), None)
    with explained("all_reduce_sum"):
        sums, _ = matching.all_reduce(lambda: _pack(matching, 1.0), 1.0)
    return matching.rebuilt(map(_sum_like, matching.leaves, _unpacked(matching.leaves, sums)))


def all_gather(value: _T) -> list[_T]:
    """Return the `value` of every rank, in rank order. Collective.

    `value` is a number, a tensor, or nested dicts, lists and tuples of them. Tensors may differ
    between ranks in their first dimension (zero rows included) and in nothing else. Two small
    collectives and one of all the data, whatever the number of leaves. Tensors keep their dtype
    and device and carry no gradient; numbers become ``int``, ``float`` or ``bool``. In a single
    process: ``[value]``, copied.

    Raises:
        TypeError: for a leaf that is no number; names its path.
        RuntimeError: where structures, dtypes or other dimensions differ, with a table; on every
            rank, and the group is usable afterwards.

    >>> all_gather(torch.arange(3))
    [tensor([0, 1, 2])]
    """
    here = require_world("all_gather")
    matching = Matching(here, "all_gather", value, _gathered_text)
    with explained("all_gather"):
        return _gathered(here, matching)


def _gathered(here: World, matching: Matching[_T]) -> list[_T]:
    matching.all_reduce(list, 0.0)
    device = matching.device
    parts = [_as_tensor(leaf) for leaf in matching.leaves]
    # What each rank brings: the rows of every leaf, then all bytes, padded to the longest.
    rows = torch.tensor([len(part) if part.ndim else 1 for part in parts], dtype=torch.int64)
    all_rows: list[list[int]] = _gather(here, rows.to(device)).tolist()
    row_bytes = [math.prod(part.shape[1:]) * part.element_size() for part in parts]
    sizes = [[n * b for n, b in zip(r, row_bytes, strict=True)] for r in all_rows]
    buffer = torch.zeros(max(map(sum, sizes)), dtype=torch.uint8, device=device)
    if parts:
        buffer[: sum(sizes[here.rank])] = torch.cat([_to_bytes(part, device) for part in parts])
    return [
        matching.rebuilt(map(_from_bytes, matching.leaves, counts, row[: sum(size)].split(size)))
        for counts, size, row in zip(all_rows, sizes, _gather(here, buffer), strict=True)
    ]


def _pack(matching: Matching[Any], weight: float) -> Values:
    """Return all values, times `weight`, in float64."""
    parts, device = matching.leaves, matching.device
    numbers = [_number(part, device) for part in parts]
    # 0 * NaN is NaN: what does not count is not multiplied.
    if None not in numbers:
        return [number * weight if weight else 0.0 for number in numbers if number is not None]
    # The dtype at once: a float would become a float32 first.
    wide = [torch.as_tensor(part, dtype=torch.float64, device=device) for part in parts]
    flat = torch.cat([part.detach().reshape(-1) for part in wide])
    return flat * weight if weight else torch.zeros_like(flat)


def _number(part: Leaf, device: torch.device) -> float | None:
    """Return the number that `part` is, unless it has several or reading it would stop a GPU."""
    if not isinstance(part, Tensor):
        return float(part)
    return float(part.item()) if part.ndim == 0 and part.device == device == _CPU else None


def _unpacked(parts: list[Leaf], sums: Values) -> Sequence[Tensor | float]:
    """Return what `sums` has of each leaf."""
    if isinstance(sums, list):
        return sums
    shapes = [part.shape if isinstance(part, Tensor) else torch.Size() for part in parts]
    pieces = sums.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _mean_like(leaf: Leaf, mean: Tensor | float) -> Leaf:
    if not isinstance(leaf, Tensor):
        return float(mean)
    return _on(leaf, mean, leaf.dtype if leaf.is_floating_point() else torch.get_default_dtype())


def _sum_like(leaf: Leaf, total: Tensor | float) -> Leaf:
    """Return `total` as the kind of number that `leaf` is, unless that would change its value."""
    if not isinstance(leaf, Tensor):
        whole = isinstance(leaf, Integral) and _is_integral(total)
        return int(total) if whole else float(total)
    if leaf.is_floating_point():
        return _on(leaf, total, leaf.dtype)
    # A fraction where a float was on another rank; else int64 as torch.sum, for a sum of uint8 is
    # soon beyond 255.
    return _on(leaf, total, torch.int64 if _is_integral(total) else torch.float64)


def _on(leaf: Tensor, value: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return a new tensor of `value` where `leaf` is."""
    if isinstance(value, Tensor):
        return value.to(leaf.device, dtype, copy=True)
    return torch.tensor(value, dtype=dtype, device=leaf.device)


def _is_integral(total: Tensor | float) -> bool:
    total = torch.as_tensor(total, dtype=torch.float64)
    if not torch.equal(total, total.trunc()) or total.isinf().any():  # of a float elsewhere
        return False
    _refuse_large(float(total.abs().max()) if total.numel() else 0.0)
    return True


def _require_exact(parts: list[Leaf]) -> None:
    # A large number may be gone from the sum again, and what it rounded away with it.
    for part in parts:
        if not isinstance(part, Tensor):
            _refuse_large(abs(part) if isinstance(part, Integral) else 0)
        elif part.dtype == torch.int64 and part.numel():  # no other holds so large a number
            _refuse_large(max(abs(int(part.min())), abs(int(part.max()))))


def _refuse_large(number: float) -> None:
    # 2**53 itself may be what 2**53 + 1 was rounded to.
    if number >= _EXACT:
        raise OverflowError(
            f"whole numbers and their sum must be below 2**53 to be exact, but one has "
            f"{int(number).bit_length()} bits: pass it as a float"
        )


def _checked_weight(weight: object) -> float:
    if isinstance(weight, Tensor) and weight.numel() == 1:
        weight = weight.item()
    if not isinstance(weight, Real):
        raise TypeError(f"`weight` must be one number, but is {weight!r} ({type(weight).__name__})")
    number = float(weight)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"`weight` must be a finite number that is not negative, but is {number}")
    return number


def _reduced_text(leaf: Leaf) -> str:
    # A number and a tensor without dimensions are the same, and so are all dtypes.
    if isinstance(leaf, Tensor) and leaf.ndim:
        return "x".join(map(str, leaf.shape))
    return "number"


def _gathered_text(leaf: Leaf) -> str:
    part = _as_tensor(leaf)
    shape = "x".join(["rows", *map(str, part.shape[1:])]) if part.ndim else "number"
    return f"{shape} of {part.dtype}"


def _as_tensor(leaf: Leaf) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.detach().resolve_neg()  # a lazy minus sign is not in the bytes
    if isinstance(leaf, bool):
        return torch.tensor(leaf)
    if isinstance(leaf, Integral):
        return torch.tensor(int(leaf), dtype=torch.int64)
    return torch.tensor(float(leaf), dtype=torch.float64)


def _to_bytes(part: Tensor, device: torch.device) -> Tensor:
    # A clone: one element of a column counts as contiguous, yet its stride forbids the view.
    flat = part.reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).to(device)


def _from_bytes(own: Leaf, rows: int, piece: Tensor) -> Leaf:
    part = _as_tensor(own)
    shape = (rows, *part.shape[1:]) if part.ndim else ()
    # A copy: a view may begin where an element of this dtype may not.
    tensor = piece.clone().view(part.dtype).view(shape).to(part.device)
    return tensor if isinstance(own, Tensor) else tensor.item()


def _gather(here: World, flat: Tensor) -> Tensor:
    """Stack the vectors, of one length, of all ranks."""
    if here.size == 1:
        return flat[None]
    stacked = [torch.empty_like(flat) for _ in range(here.size)]
    dist.all_gather(stacked, flat)
    return torch.stack(stacked)
