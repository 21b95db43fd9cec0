"""Nested dicts, lists and tuples: their leaves, with the path to each, and trees made of others.

The one walker for batches, samples, states and metrics.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from typing import Any, TypeAlias

import torch

Path: TypeAlias = tuple[Any, ...]
"""The keys and indices that lead to a leaf."""

# Made once: writing ``list | tuple`` takes longer than a look. The first of each is found at once.
_MAPPINGS = (dict, Mapping)
_SEQUENCES = (list, tuple)

_Test: TypeAlias = Callable[[Any], bool]
_Keys: TypeAlias = Callable[[Mapping[Any, Any]], Iterable[Any]]


def _never(_: Any) -> bool:
    return False


def is_special(part: object) -> bool:
    """Whether a container is more than its items: no dict, and no list or tuple but a plain one."""
    if isinstance(part, _SEQUENCES):
        return type(part) not in (list, tuple)
    return isinstance(part, Mapping) and not isinstance(part, dict)


def leaves(
    tree: Any, *, is_leaf: _Test = _never, keys: _Keys = iter, path: Path = ()
) -> Iterator[tuple[Path, Any]]:
    """Yield each leaf of `tree` with its path.

    Args:
        tree: dicts and other mappings, lists and tuples; anything else is a leaf.
        is_leaf: takes a part for a leaf that would be looked into.
        keys: in which order a mapping is gone through; its own if not given.
        path: stands before all paths.

    >>> list(leaves({"loss": [1, 2]}))
    [(('loss', 0), 1), (('loss', 1), 2)]
    """
    if is_leaf(tree):
        yield path, tree
    elif isinstance(tree, _MAPPINGS):
        for key in keys(tree):
            yield from leaves(tree[key], is_leaf=is_leaf, keys=keys, path=(*path, key))
    elif isinstance(tree, _SEQUENCES):
        for index, item in enumerate(tree):
            yield from leaves(item, is_leaf=is_leaf, keys=keys, path=(*path, index))
    else:
        yield path, tree


def mapped(
    tree: Any, change: Callable[[Path, Any], Any], *, is_leaf: _Test = _never, path: Path = ()
) -> Any:
    """Return a tree like `tree`, of leaves that `change` makes of the path and leaf it is given.

    A mapping that can be changed keeps its type and what else it carries: a ``defaultdict`` its
    factory, a state dict its metadata. Others become plain dicts. Lists and tuples, named ones
    included, keep their type.

    >>> mapped({"a": (1, 2)}, lambda path, leaf: (*path, 10 * leaf))
    {'a': (('a', 0, 10), ('a', 1, 20))}
    """
    if is_leaf(tree):
        return change(path, tree)
    if isinstance(tree, _MAPPINGS):
        items = {
            key: mapped(value, change, is_leaf=is_leaf, path=(*path, key))
            for key, value in tree.items()
        }
        return _mapping_like(tree, items)
    if isinstance(tree, _SEQUENCES):
        parts = [
            mapped(item, change, is_leaf=is_leaf, path=(*path, index))
            for index, item in enumerate(tree)
        ]
        return _sequence_like(tree, parts)
    return change(path, tree)


def flat(tree: Any, **options: Any) -> dict[Path, Any]:
    """Return all `leaves` by their paths; `rebuilt` makes a tree of such."""
    return dict(leaves(tree, **options))


def rebuilt(tree: Any, replacements: Mapping[Path, Any], **options: Any) -> Any:
    """Return a tree like `tree` with the leaf at each path replaced."""
    return mapped(tree, lambda path, _: replacements[path], **options)


def in_brackets(name: str, path: Path) -> str:
    """Write a path as code would: ``value['loss'][2]``.

    >>> in_brackets("value", ("loss", 2))
    "value['loss'][2]"
    """
    return name + "".join(f"[{key!r}]" for key in path)


def by_text(tree: Mapping[Any, Any]) -> list[Any]:
    """Return the keys in an order that is the same on all ranks, however they were filled."""
    return sorted(tree, key=repr)


def _sequence_like(tree: Any, parts: list[Any]) -> Any:
    if isinstance(tree, torch.Size):  # which holds integers only
        return tuple(parts)
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def _mapping_like(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(tree) is dict or not isinstance(tree, MutableMapping):
        return items
    other = copy(tree)
    other.update(items)
    return other
