"""A batch of any type: its tensors, its number of samples, the same batch without rows.

The number of samples is as recorded by the loader, else the rows or items. A record belongs to a
batch and not to a tensor, so equal tensors in other batches have none.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pardata._pytree import KeyPath, keystr, leaves_with_path, map_with_path
from pardata.environment._logger import get_logger

_log = get_logger(__name__)

# The maximum number of batches recorded for one tensor, as an in-memory dataset returns in each
# epoch.
_MOST = 8


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


class ReadRecord(NamedTuple):
    """A loader's record of a batch: number of samples read, and of ranks that share the step."""

    samples: int
    size: int


class _Entry(NamedTuple):
    """A record in `DeliveredBatches`.

    Attributes:
        read: the record.
        by_columns: whether some columns of the batch suffice to find it.
        parts: the parts of the batch. While they live, no other object has their ids.
    """

    read: ReadRecord
    by_columns: bool
    parts: list[weakref.ref[Any]]


class DeliveredBatches:
    """The records of batches that loaders have delivered, found by the ids of their parts.

    list and dict cannot be weakly referenced, and ``x, y = batch`` drops them. So a batch is looked
    up by its columns. Nothing is kept alive.
    """

    def __init__(self) -> None:
        # By the id of a column: a weak reference to it, and the batches with it, by the hash of
        # their parts' ids.
        self._batches: dict[int, tuple[weakref.ref[Any], dict[int, _Entry]]] = {}

    def add(self, batch: Any, read: ReadRecord) -> None:
        """Add the record of `batch`, before the loop gets it."""
        key, columns = _key(batch), _columns(batch)
        are_samples = is_list(batch) and len(batch) == read.samples and _are_alike(batch)
        parts = [] if are_samples else [part for part in _parts(batch) if _has_weakrefs(part)]
        entry = _Entry(read, not are_samples, [weakref.ref(part) for part in parts])
        for column in columns[:1] if are_samples else columns:
            if (number := id(column)) not in self._batches:
                self._batches[number] = weakref.ref(column, partial(self._batches.pop, number)), {}
            batches = self._batches[number][1]
            batches.pop(key, None)  # the newest is last
            batches[key] = entry
            if len(batches) > _MOST:
                del batches[next(iter(batches))]

    def get(self, batch: Any) -> ReadRecord | None:
        """Return the record of `batch`, or of a delivered batch that has all of its columns."""
        held = [self._batches.get(id(column), (None, {}))[1] for column in _columns(batch)]
        if not held:
            return None
        entry = held[0].get(_key(batch))
        if entry is not None and all(part() is not None for part in entry.parts):
            return entry.read
        common = (
            entry.read
            for key, entry in reversed(held[0].items())
            if entry.by_columns and all(key in batches for batches in held)
        )
        return next(common, None)


delivered = DeliveredBatches()


def _parts(batch: Any) -> Sequence[Any]:
    if isinstance(batch, list | tuple):
        return batch
    return [*batch.values()] if isinstance(batch, dict) else [batch]


def _key(batch: Any) -> int:
    """Return a hash of the ids of the parts of `batch`."""
    return hash(tuple(map(id, _parts(batch))))


def _has_weakrefs(part: Any) -> bool:
    """Whether this can be weakly referenced: no number, no string, no list and no dict can."""
    return bool(type(part).__weakrefoffset__)


def _columns(batch: Any) -> list[Any]:
    """Return the first weakly referenceable object of each part of `batch`."""
    return [*filter(_has_weakrefs, map(_first, _parts(batch)[:_MOST]))]


def _first(batch: Any) -> Any:
    """Return the first tensor or other weakly referenceable object in `batch`."""
    part = batch
    while isinstance(part, list | tuple | dict) and part:
        part = next(iter(part.values())) if isinstance(part, dict) else part[0]
    if _has_weakrefs(part):
        return part
    return next((leaf for _, leaf in leaves_with_path(batch) if _has_weakrefs(leaf)), None)


def num_samples(batch: Any, read: int | None = None) -> int:
    """Return the number of samples of `batch`: as recorded, else its rows or items.

    It is 0 if no tensor of it has rows.

    Args:
        batch: any object.
        read: the number of samples read for it, if the caller knows it; else that of its record.

    Raises:
        TypeError: there is no record, and neither rows nor items show the number.
    """
    if read is None and (record := delivered.get(batch)) is not None:
        read = record.samples
    first = _first(batch)
    if read and isinstance(first, Tensor) and first.shape[:1] == (read,):
        return read  # the usual case
    if is_empty(batch):
        return 0
    shown = _shown(batch)
    if read is None:
        if shown is None:
            raise TypeError(
                f"`batch` must tell how many samples it has, by the rows of a tensor or the items "
                f"of a list, but this {type(batch).__name__} does not: pass `count`, or "
                f"make it a dict whose first tensor has a row for each sample"
            )
        return shown
    if shown not in (read, None) and not (is_list(batch) and len(batch) == read):
        text = (
            "%d samples were read for `batch`, but it looks like %d: it counts as %d. If its "
            "collate_fn left samples out, pass `count`, or let the dataset return None for them"
        )
        _log.warning(text, read, shown, read, ranks="all", once=True)
    return read


def is_empty(batch: Any) -> bool:
    """Whether `batch` has tensors with dimensions, all of them without rows."""
    first = _first(batch)
    if isinstance(first, Tensor) and first.numel():
        return False
    sized = [tensor for tensor in iter_tensors(batch) if tensor.ndim]
    return bool(sized) and not any(map(len, sized))


def _shown(batch: Any) -> int | None:
    """Return the rows of the first tensor, or the items of the lists; None if that is unclear."""
    if isinstance(batch, PackedSequence):
        return None  # its rows are elements of several samples
    if isinstance(batch, Tensor) or not isinstance(batch, Mapping | list | tuple):
        return _common_rows(batch)  # in a graph, tensors of nodes and edges differ in rows
    parts = [*batch.values()] if isinstance(batch, Mapping) else batch
    columns = [part for part in parts if is_text(part) or (isinstance(part, Tensor) and part.ndim)]
    if columns:
        # Tensors of one type and different lengths may be columns, or samples that are sequences.
        is_clear = not is_list(batch) or len(columns) < len(parts) or not _are_alike(columns)
        return len(columns[0]) if is_clear or len({*map(len, columns)}) == 1 else None
    # A list may hold one field of all samples, or one sample.
    is_clear = _are_alike(parts) and not all(map(is_list, parts))
    return len(parts) if is_clear and _common_rows(parts) in (None, len(parts)) else None


def _common_rows(part: Any) -> int | None:
    """Return the number of rows of the tensors in `part`, if it is the same for all."""
    rows = {len(tensor) for tensor in iter_tensors(part) if tensor.ndim}
    return rows.pop() if len(rows) == 1 else None


def _are_alike(items: Iterable[Any]) -> bool:
    """Whether `items` have equal types, dtypes and dimensions, as one field of several samples."""
    kinds = {(item.dtype, item.ndim) if isinstance(item, Tensor) else type(item) for item in items}
    return len(kinds) == 1


class UnevenShares:
    """Warns once if a training forward outside of `backward` would average uneven shares."""

    batch_size = 0

    def warn(self) -> None:
        """Log the warning if a training loader has uneven shares."""
        if not self.batch_size:
            return
        batch_size, self.batch_size = self.batch_size, 0
        ranks = dist.get_world_size()
        text = (
            f"`batch_size` {batch_size} leaves {ranks} ranks shares that differ by one sample, and "
            f"a loss.backward() takes the plain mean of their gradients: call `pardata.backward`, "
            f"which weights them, choose a multiple of {ranks}, or weight the loss yourself"
        )
        _log.warning(text, ranks=[0], once=True)


uneven_shares = UnevenShares()
