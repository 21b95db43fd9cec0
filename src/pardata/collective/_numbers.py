"""What is reduced: dense tensors and real numbers, the leaves of a value."""

from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pardata.collective import _tree
from pardata.collective._tree import Path

Leaf: TypeAlias = Tensor | float
"""A dense tensor or a real number (a bool and a NumPy scalar are numbers)."""


def numbers_of(value: object) -> dict[Path, Leaf]:
    """Return the leaves of `value` by their paths, in the same order on every rank.

    Raises:
        TypeError: for a leaf that is no number, naming its path, as ``value['loss'][2]``.
    """
    found = _tree.leaves(value, keys=_tree.by_text)
    return {path: _number(leaf, path) for path, leaf in found}


def _number(leaf: Any, path: Path) -> Leaf:
    # By exact type first: metrics are reduced often, and an abstract class takes a microsecond.
    if type(leaf) is float or type(leaf) is int:
        return leaf
    if isinstance(leaf, Tensor):
        return _dense(leaf, path)
    if getattr(leaf, "ndim", None) == 0 and hasattr(leaf, "item"):
        leaf = leaf.item()  # a NumPy scalar: its bool is no Real
    if isinstance(leaf, Real):
        return leaf  # type: ignore[return-value]  # Real is what numbers have in common
    name = _tree.in_brackets("value", path)
    msg = f"`{name}` must be a number or a tensor, but is {leaf!r} ({type(leaf).__name__})"
    raise TypeError(msg)


def _dense(leaf: Tensor, path: Path) -> Tensor:
    if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout != torch.strided:
        kind = f"a {leaf.layout} {type(leaf).__name__}"
    elif leaf.is_complex():
        kind = "complex"
    else:
        return leaf
    name = _tree.in_brackets("value", path)
    msg = f"`{name}` must be a dense tensor of real numbers, but is {kind}: convert it first"
    raise TypeError(msg)
