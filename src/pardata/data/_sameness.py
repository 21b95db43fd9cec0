"""Whether two readings of one sample are the same, to the last bit."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def same(one: Any, other: Any) -> bool:
    """Return whether two samples are equal; what cannot be compared counts as equal.

    Tensors, arrays and numbers are equal where NaN stands in both, images where their pixels are.
    """
    try:
        return _same(one, other)
    except Exception:  # noqa: BLE001  # a user's objects: this is advice and must not end a run
        return True


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
            *(_bits(tensor) for tensor in (one, other))
        )
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return _same_object(one, other)


def _same_object(one: Any, other: Any) -> bool:
    if str(getattr(one, "dtype", "")) == "object":  # an array whose bytes are addresses
        return same(one.tolist(), other.tolist())
    if hasattr(one, "tobytes"):  # an array, a NumPy number, an image
        return _form(one) == _form(other) and bool(one.tobytes() == other.tobytes())
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if type(one).__eq__ is object.__eq__:  # type: ignore[comparison-overlap]  # no equality of its own
        return True
    return bool(one == other)


def _form(thing: Any) -> list[Any]:
    return [getattr(thing, name, None) for name in ("dtype", "shape", "size", "mode")]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
