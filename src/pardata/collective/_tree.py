"""Nested dicts, lists and tuples of numbers and tensors, taken apart and put together again."""

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

Leaf: TypeAlias = Tensor | float
"""A dense tensor or a real number (a bool and a NumPy scalar are numbers)."""


def named_leaves(value: object) -> list[tuple[str, Leaf]]:
    """Return the leaves of `value` with their paths, dictionaries in the order of sorted keys.

    Raises:
        TypeError: for a leaf that is no number, naming its path, as ``value['loss'][2]``.
    """
    found: list[tuple[str, Leaf]] = []
    _collect(value, "value", found)
    return found


def rebuild(value: object, replacements: Iterator[Any]) -> Any:
    """Return a structure like `value` with its leaves replaced, in the order of `named_leaves`."""
    if isinstance(value, dict | Mapping):
        new = {key: rebuild(value[key], replacements) for key in _sorted_keys(value)}
        return {key: new[key] for key in value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuild(item, replacements) for item in value))
    if isinstance(value, list | tuple):
        items = [rebuild(item, replacements) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return next(replacements)


def _collect(value: Any, path: str, found: list[tuple[str, Leaf]]) -> None:
    # By exact type first: metrics are reduced often, and an abstract class takes a microsecond.
    if type(value) is float or type(value) is int:
        found.append((path, value))
    elif isinstance(value, dict | Mapping):
        for key in _sorted_keys(value):
            _collect(value[key], f"{path}[{key!r}]", found)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect(item, f"{path}[{index}]", found)
    else:
        found.append((path, _leaf(value, path)))


def _leaf(value: object, path: str) -> Leaf:
    if isinstance(value, Tensor):
        if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            kind = f"a {value.layout} {type(value).__name__}"
        elif value.is_complex():
            kind = "complex"
        else:
            return value
        msg = f"`{path}` must be a dense tensor of real numbers, but is {kind}: convert it first"
        raise TypeError(msg)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()  # a NumPy scalar: its bool is no Real
    if isinstance(value, Real):
        return value  # type: ignore[return-value]  # Real is what numbers have in common
    msg = f"`{path}` must be a number or a tensor, but is {value!r} ({type(value).__name__})"
    raise TypeError(msg)


def _sorted_keys(value: Mapping[Any, object]) -> list[Any]:
    # Ranks may have filled their dictionaries in different orders.
    return sorted(value, key=repr)
