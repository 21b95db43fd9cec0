"""What can be written so that it is read again without running code."""

import io
import textwrap
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pardata.collective._tree import in_brackets, is_special, leaves, mapped

_LONG = 2**63


def require_safe(trees: Mapping[str, Any]) -> None:
    """Raise for what could be written and not be read again.

    Raises:
        TypeError: names the first leaf that could not, or the tree whose keys could not.
    """
    if _is_plain(trees):
        return
    # Asking PyTorch itself, which knows what the user has allowed beside its own.
    # Of tensors only those of classes that need not be known to it.
    skeleton = mapped(
        trees, lambda _, leaf: None if type(leaf) is Tensor else leaf, is_leaf=is_special
    )
    why = _refusal(skeleton)
    if why is None:
        return
    parts = [
        *leaves(skeleton, is_leaf=is_special),
        *(((name,), tree) for name, tree in skeleton.items()),
    ]
    (name, *path), found = next(part for part in parts if _refusal(part[1]) is not None)
    text = textwrap.shorten(repr(found), 100)
    kind = f"{type(found).__module__}.{type(found).__qualname__}"
    msg = (
        f"what is saved must be tensors, numbers, strings, and dicts, lists and tuples of them, "
        f"but `{in_brackets(name, tuple(path))}` is {text} ({kind}): convert it, or leave it out; "
        f"it would have to run code when it is loaded"
    )
    raise TypeError(msg) from why


def _is_plain(tree: Any) -> bool:
    """Whether a tree is, to the last leaf, of what any PyTorch loads: asking it takes longer."""
    kind = type(tree)
    if kind is dict:
        return all(map(_is_plain, tree)) and all(map(_is_plain, tree.values()))
    if kind is OrderedDict:  # of a state_dict(), with `_metadata` beside the items
        return _is_plain(dict(tree)) and _is_plain(vars(tree))
    if kind in (list, tuple):
        return all(map(_is_plain, tree))
    if kind is int:
        return bool(-_LONG <= tree < _LONG)
    return kind in (float, bool, str, type(None), Tensor)


def _refusal(tree: Any) -> Exception | None:
    """Return why a tree cannot be written, or read again without running code, if so."""
    file = io.BytesIO()
    try:
        torch.save(tree, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # noqa: BLE001  # whatever the user's own pickling raises
        return error
    return None
