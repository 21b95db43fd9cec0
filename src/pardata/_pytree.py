"""Flatten, map and hash nested dicts, lists and tuples.

A leaf is anything else: a tensor, a number, an object. Batches, samples, states and metrics are
such trees.
"""

import hashlib
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor

# The keys and indices that lead to a leaf.
KeyPath: TypeAlias = tuple[Any, ...]

_Test: TypeAlias = Callable[[Any], bool] | None
_Change: TypeAlias = Callable[[KeyPath, Any], Any]

# The types of most leaves.
_LEAVES = {Tensor, torch.nn.Parameter, int, float, str, bytes, bool, type(None)}


def is_custom_container(part: object) -> bool:
    """Whether this is a mapping that is no dict, or a subclass of list or tuple."""
    if isinstance(part, list | tuple):
        return type(part) not in (list, tuple)
    return isinstance(part, Mapping) and not isinstance(part, dict)


def _parts(tree: Any, is_leaf: _Test, *, by_text: bool) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a container with their keys or indices, and `None` for a leaf."""
    if type(tree) in _LEAVES or (is_leaf is not None and is_leaf(tree)):
        return None
    if isinstance(tree, (list, tuple)):  # before `Mapping`, an abstract class, which takes longer
        return enumerate(tree)
    if not isinstance(tree, (dict, Mapping)):  # a dict is found at once
        return None
    keys = tree.keys()  # some mappings iterate over rows
    return [(key, tree[key]) for key in (sorted(keys, key=repr) if by_text else keys)]


def leaves_with_path(
    tree: Any, *, is_leaf: _Test = None, by_text: bool = False, path: KeyPath = ()
) -> list[tuple[KeyPath, Any]]:
    """Return each leaf of `tree` with its path.

    Args:
        tree: dicts and other mappings, lists and tuples; anything else is a leaf.
        is_leaf: returns True for a container that counts as a leaf.
        by_text: sort the keys of a mapping by their texts, so that the order is the same on all
            ranks.
        path: a prefix of all paths.

    >>> leaves_with_path({"loss": [1, 2]})
    [(('loss', 0), 1), (('loss', 1), 2)]
    """
    parts = _parts(tree, is_leaf, by_text=by_text)
    if parts is None:
        return [(path, tree)]
    pairs: list[tuple[KeyPath, Any]] = []
    for key, part in parts:
        if type(part) in _LEAVES:  # most are; a call for each takes as long again
            pairs.append(((*path, key), part))
        else:
            pairs += leaves_with_path(part, is_leaf=is_leaf, by_text=by_text, path=(*path, key))
    return pairs


def map_with_path(tree: Any, change: _Change, *, is_leaf: _Test = None, path: KeyPath = ()) -> Any:
    """Return a tree like `tree` with the leaves that `change(path, leaf)` returns.

    `tree` is not changed. A subclass of ``dict`` or ``UserDict`` keeps its type and its attributes:
    the factory of a ``defaultdict``, the metadata of a state dict. Other mappings become plain
    dicts: a copy of one may share its items. Lists and tuples, named ones included, keep their
    type.

    >>> map_with_path({"a": (1, 2)}, lambda path, leaf: (*path, 10 * leaf))
    {'a': (('a', 0, 10), ('a', 1, 20))}
    """
    parts = _parts(tree, is_leaf, by_text=False)
    if parts is None:
        return change(path, tree)
    items = {
        key: change((*path, key), part)
        if type(part) in _LEAVES  # as in `leaves_with_path`
        else map_with_path(part, change, is_leaf=is_leaf, path=(*path, key))
        for key, part in parts
    }
    return _like(tree, items)


def keystr(name: str, path: KeyPath) -> str:
    """Write a path as code would: ``value['loss'][2]``.

    >>> keystr("value", ("loss", 2))
    "value['loss'][2]"
    """
    return name + "".join(f"[{key!r}]" for key in path)


def require_dense(tree: Any, name: str, path: KeyPath = ()) -> None:
    """Raise a `TypeError` for a tensor in a tree that cannot be sent, hashed and saved.

    It holds no memory, or other numbers than its elements. Sparse COO tensors may be saved.
    """
    for at, leaf in leaves_with_path(tree, path=path):
        if isinstance(leaf, Tensor):
            what = "on meta" if leaf.is_meta else "nested" if leaf.is_nested else ""
            if leaf.is_quantized or leaf.layout not in (torch.strided, torch.sparse_coo):
                what = what or str(leaf.dtype if leaf.is_quantized else leaf.layout)
            if what:
                msg = f"`{keystr(name, at)}` must be a dense or sparse COO tensor with memory, but "
                msg += f"is {what}: convert it first"
                raise TypeError(msg)


def _like(tree: Any, items: dict[Any, Any]) -> Any:
    """Return a container of the type of `tree` with `items`, by key or index."""
    if not isinstance(tree, (list, tuple)):
        if type(tree) is dict or not isinstance(tree, (dict, UserDict)):
            return items
        other: Any = copy(tree)
        if getattr(tree, "__dict__", None) is tree:  # its items are its attributes
            other.__dict__ = other
        for key, item in items.items():  # the `update` of a Counter adds, others refuse it
            other[key] = item
        return other
    parts = list(items.values())
    if isinstance(tree, torch.Size):  # it holds integers only
        return tuple(parts)
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def content_hash(tree: Any) -> str:
    """Return a short hash of the tensors, arrays, images, numbers and texts in a tree.

    Of any other leaf it hashes only the type.
    """
    pairs = leaves_with_path(tree, by_text=True)
    return sha256_of((f"{path} {_form(leaf)}", leaf) for path, leaf in pairs)[:16]


def sha256_of(named: Iterable[tuple[str, Any]]) -> str:
    """Return the SHA-256 of pairs of a text and the bits of a leaf."""
    digest = hashlib.sha256()
    for text, leaf in named:
        digest.update(text.encode())
        _add(digest, leaf)
    return digest.hexdigest()


def _form(leaf: Any) -> list[Any]:
    names: tuple[str, ...] = ("dtype", "shape") if isinstance(leaf, Tensor) else ()
    if hasattr(leaf, "tobytes"):
        names = ("dtype", "shape", "size", "mode")
    return [type(leaf).__name__, *(getattr(leaf, name, None) for name in names)]


def bytes_of(tensor: Tensor) -> bytearray:
    """Return the bytes of a dense tensor, without NumPy, which torch does not require."""
    tensor = tensor.detach().int_repr() if tensor.is_quantized else tensor.detach()
    data = bytearray(tensor.numel() * tensor.element_size())
    if data:
        torch.frombuffer(data, dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return data


def _add(digest: Any, leaf: Any) -> None:
    if isinstance(leaf, Tensor):
        dense = leaf.detach() if leaf.layout == torch.strided else leaf.detach().to_dense()
        digest.update(bytes_of(dense))
    elif str(getattr(leaf, "dtype", "")) == "object":  # an array whose bytes are addresses
        digest.update(content_hash(leaf.tolist()).encode())
    elif hasattr(leaf, "tobytes"):  # an array, a NumPy number, an image
        digest.update(leaf.tobytes())
    elif isinstance(leaf, str | bytes | int | float | complex):
        digest.update(repr(leaf).encode())
