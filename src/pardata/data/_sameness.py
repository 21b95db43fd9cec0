"""Whether two readings of one sample are the same, to the last bit."""

import math
from typing import Any

import torch
from torch import Tensor

from pardata.collective._tree import leaves


def same(one: Any, other: Any) -> bool:
    """Return whether two samples are equal; what cannot be compared counts as equal.

    Tensors, arrays and numbers are equal where NaN stands in both, images where their pixels are.
    """
    try:
        ours, theirs = (dict(leaves(sample, by_text=True)) for sample in (one, other))
    except RecursionError:  # of what holds itself
        return True
    return ours.keys() == theirs.keys() and all(_same(ours[path], theirs[path]) for path in ours)


def _same(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and _equal(one, other)
    except Exception:  # noqa: BLE001  # a user's objects: this is advice and must not end a run
        return True


def _equal(one: Any, other: Any) -> bool:
    """Return whether two leaves of one type are equal."""
    if isinstance(one, Tensor):
        is_like = (one.dtype, one.shape) == (other.dtype, other.shape)
        return is_like and torch.equal(_bits(one), _bits(other))
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
