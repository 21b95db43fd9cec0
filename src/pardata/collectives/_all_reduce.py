"""Reduce numbers, tensors and nested structures of them over all ranks, in one collective.

Does not carry gradients, and needs the same structure on every rank.
"""

import math
from numbers import Integral, Real
from typing import Any, TypeAlias, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.collectives._comm_errors import explain_comm_errors
from pardata.collectives._fingerprint import PAYLOAD_SLOTS, CheckedCollective, Leaf, numbers_of

_T = TypeVar("_T")

# Values to reduce: a list of numbers, which takes less time, or a vector if there are tensors.
_Values: TypeAlias = list[float] | Tensor

_SUM = dist.ReduceOp.SUM


@overload
def all_reduce_mean(value: float, weight: float | Tensor = 1) -> float: ...


@overload
def all_reduce_mean(value: _T, weight: float | Tensor = 1) -> _T: ...


def all_reduce_mean(value: Any, weight: float | Tensor = 1) -> Any:
    """Return the mean of `value` over all ranks, weighted by each rank's `weight`. Collective.

    `value` is a number, a tensor, or nested dicts, lists and tuples of them; the result has the
    same structure. One collective sends up to 57 numbers in all, and a second one all others.
    Tensors on GPUs travel in a separate one. It waits for a GPU only if `weight` is on one.
    Sums are in float64. Floating-point tensors keep their dtype and device, integer and bool
    tensors become the default floating dtype, numbers become ``float``. The input is not changed
    and the result carries no gradient. In a single process the value itself is the mean.

    Args:
        value: what to average. A number on one rank may be a tensor without dimensions on another.
        weight: how much this rank's value counts, for example its number of samples. With 0 it does
            not count at all, not even NaN.

    Raises:
        TypeError: a leaf, whose path the error names, or a weight is no number.
        ValueError: a weight is negative or not finite, or all weights are 0.
        RuntimeError: structures or shapes differ between ranks; the error has a table. All errors
            come on every rank, and the group is usable afterwards.

    >>> all_reduce_mean({"loss": 0.5, "correct": torch.tensor([3.0, 1.0])}, weight=8)
    {'loss': 0.5, 'correct': tensor([3., 1.])}
    """
    checked = CheckedCollective("all_reduce_mean", lambda: numbers_of(value), shape_text)
    number = checked.capture(lambda: checked_weight(weight), 0.0)
    if checked.world.size == 1:
        number = float(number > 0)  # in one process, the mean is bitwise the value
    with explain_comm_errors("all_reduce_mean"):
        total, sums = _reduce(checked, number)
    if total == 0:
        msg = "`weight` must be positive on a rank, but is 0 on all: nothing was counted"
        raise ValueError(msg)
    return checked.rebuilt(value, map(cast_like, checked.leaves, [part / total for part in sums]))


def all_reduce_sum(value: _T) -> _T:
    """Return the sum of `value` over all ranks. Collective.

    It works like `all_reduce_mean`, without a weight. Whole numbers stay whole.
    Integer and bool tensors become int64, as with ``torch.sum``.

    Raises:
        TypeError: a leaf, whose path the error names, is no number.
        OverflowError: whole numbers or a sum of them reach 2**53, from where float64 is not exact.
            Whole numbers on GPUs cannot: a separate collective adds them in int64.
        RuntimeError: structures or shapes differ between ranks; the error has a table. All errors
            come on every rank, and the group is usable afterwards.

    >>> all_reduce_sum([3, torch.tensor([1.5, 2.5])])
    [3, tensor([1.5000, 2.5000])]
    """
    return _exactly("all_reduce_sum", value, _SUM)


def all_reduce_max(value: _T) -> _T:
    """Return the largest `value` of all ranks, number by number. Collective.

    It works like `all_reduce_sum` with one more collective. The result is NaN if
    any rank has NaN. Floating-point tensors keep their dtype. Whole numbers stay whole, and integer
    and bool tensors become int64.

    Raises:
        TypeError: a leaf, whose path the error names, is no number.
        OverflowError: whole numbers that are not on a GPU reach 2**53.
        RuntimeError: structures or shapes differ between ranks; the error has a table. All errors
            come on every rank, and the group is usable afterwards.

    >>> all_reduce_max({"seconds": 1.5, "length": torch.tensor([3, 4])})
    {'seconds': 1.5, 'length': tensor([3, 4])}
    """
    return _exactly("all_reduce_max", value, dist.ReduceOp.MAX)


def all_reduce_min(value: _T) -> _T:
    """Return the smallest `value` of all ranks, number by number. Collective.

    In all other respects it works like `all_reduce_max`.

    >>> all_reduce_min([3, torch.tensor([1.5, 2.5])])
    [3, tensor([1.5000, 2.5000])]
    """
    return _exactly("all_reduce_min", value, dist.ReduceOp.MIN)


def _exactly(call: str, value: _T, op: Any) -> _T:
    """Reduce `value`; integers stay integers."""
    checked = CheckedCollective(call, lambda: numbers_of(value), shape_text, exact=True)
    with explain_comm_errors(call):
        _, reduced = _reduce(checked, 1, op)
    return checked.rebuilt(value, map(_cast_exactly, checked.leaves, reduced))


def _reduce(checked: CheckedCollective, weight: float, op: Any = _SUM) -> tuple[float, list[Any]]:
    """Return the sum of the weights, and each leaf times this rank's weight, reduced over ranks."""
    packed: dict[Any, _Values] = {}

    def in_header(wire: Any) -> bool:
        return wire is None and op == _SUM and len(packed[None]) < PAYLOAD_SLOTS

    def pack() -> list[float]:
        packed.clear()
        for wire in dict.fromkeys([None, *checked.wire_dtypes]):
            packed[wire] = _flatten(checked, wire, weight)
        near = packed[None] if in_header(None) else []
        return [weight, *(near if isinstance(near, list) else near.tolist())]

    total, *near = checked.all_reduce(pack)
    reduced: dict[Any, Any] = {}
    for wire, values in packed.items():
        if in_header(wire) and isinstance(values, list):
            reduced[wire] = iter(near)
            continue
        sums = checked.vector(near) if in_header(wire) else _all_reduce_flat(checked, values, op)
        reduced[wire] = iter(unflatten_like(sums, checked.leaves_with(wire)))
    return total, [next(reduced[wire]) for wire in checked.wire_dtypes]


def unflatten_like(flat: Tensor, leaves: list[Leaf]) -> list[Tensor]:
    """Split the front of a vector into tensors of the shapes of `leaves`."""
    shapes = [getattr(leaf, "shape", torch.Size()) for leaf in leaves]
    sizes = [shape.numel() for shape in shapes]
    parts = flat[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def weighted_numbers(leaves: list[Leaf], weights: list[float]) -> list[float] | None:
    """Return each leaf times its weight; None if one has dimensions, or is on an accelerator."""
    if any(isinstance(leaf, Tensor) and (leaf.ndim or not leaf.is_cpu) for leaf in leaves):
        return None
    # Not `float` of a tensor, which warns if it requires a gradient.
    numbers = [leaf.item() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    # 0 * NaN is NaN, so values with weight 0 are not multiplied.
    pairs = zip(numbers, weights, strict=False)
    return [float(number) * weight if weight else 0.0 for number, weight in pairs]


def _flatten(checked: CheckedCollective, wire: Any, weight: float) -> _Values:
    """Return all leaves with the wire dtype `wire` in one vector, times `weight`."""
    parts, dtype, device = checked.leaves_with(wire), wire, checked.world.device
    if wire is None:
        parts = [part.cpu() if isinstance(part, Tensor) else part for part in parts]
        for part in filter(_is_integer_kind, parts if checked.exact else []):
            _require_exact(part)
        if (numbers := weighted_numbers(parts, [weight] * len(parts))) is not None:
            return numbers
        dtype, device = torch.float64, checked.device
    # With `dtype`, because a Python float would become float32 first.
    wide = [torch.as_tensor(part, dtype=dtype, device=device) for part in parts]
    flat = torch.cat([part.detach().reshape(-1) for part in wide])
    return flat.mul_(weight) if weight else flat.zero_()


def _all_reduce_flat(checked: CheckedCollective, values: _Values, op: Any) -> Tensor:
    """Reduce a vector in a collective of its own; all ranks have agreed on its length."""
    flat = checked.vector(values) if isinstance(values, list) else values
    if checked.world.size == 1 or not len(flat):
        return flat
    if op == _SUM or not flat.is_floating_point():
        dist.all_reduce(flat, op, group=checked.group(flat))
        return flat
    # MIN and MAX of NaN depend on the backend and the order of ranks, so a flag for NaN is reduced
    # next to each number.
    sign = 1 if op == dist.ReduceOp.MAX else -1
    is_nan = flat.isnan()
    both = torch.cat([flat.masked_fill(is_nan, -sign * math.inf), sign * is_nan])
    dist.all_reduce(both, op, group=checked.group(both))
    return both[: len(flat)].masked_fill_(both[len(flat) :] != 0, math.nan)


def cast_like(leaf: Leaf, value: Tensor | float, dtype: torch.dtype | None = None) -> Leaf:
    """Return `value` as a float, or as a tensor if `leaf` is one, of its floating dtype."""
    if not isinstance(leaf, Tensor):
        return float(value)
    kind = leaf.dtype if leaf.is_floating_point() else dtype or torch.get_default_dtype()
    if isinstance(value, Tensor):
        return value.to(leaf.device, kind, copy=True)
    # Takes half the time of torch.tensor.
    return torch.full((), value, dtype=kind, device=leaf.device)


def _cast_exactly(leaf: Leaf, total: Tensor | float) -> Leaf:
    """Return `total` in the type of `leaf`, unless that would change its value."""
    # A fraction, if the leaf is a float on another rank. Otherwise int64, as with torch.sum,
    # because uint8 would overflow.
    if not _is_integer_kind(leaf) or not _is_integral(total):
        return cast_like(leaf, total, torch.float64)
    return cast_like(leaf, total, torch.int64) if isinstance(leaf, Tensor) else int(total)


def _is_integer_kind(leaf: Leaf) -> bool:
    return isinstance(leaf, Integral) or (isinstance(leaf, Tensor) and not leaf.is_floating_point())


def _is_integral(total: Tensor | float) -> bool:
    if isinstance(total, Tensor) and total.dtype == torch.int64:  # reduced as int64
        return True
    # A fraction comes from a float on another rank. The fraction of infinity is NaN.
    integral = bool((total.frac() == 0).all()) if isinstance(total, Tensor) else total.is_integer()
    if integral:
        _require_exact(total)
    return integral


def _require_exact(number: Leaf) -> None:
    # Each number is checked, because a large one may cancel in the sum after it has rounded others
    # away. 2**53 itself may be a rounded 2**53 + 1.
    if isinstance(number, Tensor):
        number = float(number.double().abs().max()) if number.numel() else 0
    if abs(number) >= 2**53:
        msg = "whole numbers and their sum must be below 2**53 to be exact, but one has "
        msg += f"{int(number).bit_length()} bits: pass it as a float"
        raise OverflowError(msg)


def checked_weight(weight: object, name: str = "weight") -> float:
    """Return a weight as a float: one number, finite, not negative."""
    if isinstance(weight, Tensor) and weight.numel() == 1:
        weight = weight.item()
    if not isinstance(weight, Real):
        raise TypeError(f"`{name}` must be one number, but is {weight!r} ({type(weight).__name__})")
    number = float(weight)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"`{name}` must be a finite number that is not negative, but is {number}")
    return number


def shape_text(leaf: Leaf) -> str:
    """Return a text of the shape, which must be equal on all ranks."""
    # A number equals a tensor without dimensions. Dtypes may differ.
    if isinstance(leaf, Tensor) and leaf.ndim:
        return "x".join(map(str, leaf.shape))
    return "number"
