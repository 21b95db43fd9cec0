"""Finds the tensors of a batch, and makes a batch without rows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pardata._pytree import KeyPath, keystr, leaves_with_path, map_with_path


class Ragged(list[Any]):
    """A column of a batch whose rows differ in shape: a list of one item for each sample."""


def is_list(part: Any) -> bool:
    """Whether this is a list or a tuple, but no named tuple."""
    return isinstance(part, list | tuple) and not hasattr(part, "_fields")


def is_text(part: Any) -> bool:
    """Whether this is a list of strings, as the default `collate_fn` returns for a string field."""
    return is_list(part) and all(isinstance(item, str | bytes) for item in part)


def iter_tensors(batch: Any, seen: dict[int, Any] | None = None) -> Iterator[Tensor]:
    """Yield every tensor in `batch`, also in attributes of its objects."""
    seen = {} if seen is None else seen  # holds the objects, so that their ids are not reused
    for _, leaf in leaves_with_path(batch, is_leaf=lambda part: hasattr(part, "__dict__")):
        if id(leaf) in seen:
            continue
        seen[id(leaf)] = leaf
        if isinstance(leaf, Tensor):
            yield leaf
        else:
            yield from iter_tensors(_inside(leaf), seen)


def _inside(part: Any) -> list[Any]:
    """Return the attributes of an object, and its items if it is a collection."""
    held = list(getattr(part, "__dict__", {}).values())
    slots = (name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ()))
    held += [getattr(part, name) for name in slots if hasattr(part, name)]
    # `Microbatches` have items and a placeholder.
    is_collection = isinstance(part, Sequence) and hasattr(part, "__dict__")
    if is_collection or isinstance(part, set | frozenset):
        held += part
    return held + list(part.values()) if isinstance(part, Mapping) else held


def empty_batch(batch: Any, *, lists_are_columns: bool) -> Any:
    """Return `batch`, of one sample, without rows: tensors and lists of strings cut to ``[:0]``.

    Args:
        batch: a batch of one sample.
        lists_are_columns: whether lists are columns, as in ``default_collate``. In other batches a
            list of one item may be a list of samples, as of images of different sizes.

    Raises:
        TypeError: the batch holds another type, whose rows are unknown.
    """

    def may_be_samples(part: Any) -> bool:
        return is_list(part) and len(part) == 1 and not lists_are_columns

    def empty(path: KeyPath, leaf: Any) -> Any:
        if isinstance(leaf, Ragged) or is_text(leaf) or (isinstance(leaf, Tensor) and leaf.ndim):
            return leaf[:0]
        what = type(leaf).__name__ + " without dimensions" * isinstance(leaf, Tensor)
        if may_be_samples(leaf):
            what += " of one item, which may be a sample"
        raise TypeError(
            f"a batch must be made of tensors, dicts, lists and tuples for a rank to get none of "
            f"its rows, but `{keystr('batch', path)}` is a {what}: evaluate over "
            f"Microbatches, of which a rank may have none (pass `microbatch_size`), or use "
            f"drop_last=True, or a batch size that leaves every rank a sample"
        )

    def is_leaf(part: Any) -> bool:
        return isinstance(part, Ragged) or is_opaque(part) or may_be_samples(part)

    return map_with_path(batch, empty, is_leaf=is_leaf)


def is_opaque(batch: Any) -> bool:
    """Whether this collection is one value: a list of strings, or a `PackedSequence`."""
    return isinstance(batch, PackedSequence) or is_text(batch)
