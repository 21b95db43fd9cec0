"""A batch of any type: its tensors, its number of samples, the same batch without rows.

For what a loader yielded, the number of samples is what the loader read. For any other batch it is
the rows or items.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pardata._pytree import KeyPath, keystr, leaves_with_path, map_with_path
from pardata.environment._logger import get_logger

_log = get_logger(__name__)

# The maximum number of records. An in-memory dataset may put the same tensors, which are never
# gone, into a new tuple in each epoch.
_MOST = 10_000


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


def empty_batch(batch: Any, *, lists_are_columns: bool, samples: int | None = None) -> Any:
    """Return `batch` without rows: tensors and lists of strings cut to ``[:0]``.

    Args:
        batch: a batch of one sample, or of several of a stream.
        samples: how many samples it has, which its tensors must have as rows, or 1. None if
            unknown.
        lists_are_columns: whether lists are columns, as in ``default_collate``. In other batches a
            list of one item may be a list of samples, as of images of different sizes.

    Raises:
        TypeError: the batch holds another type, or a tensor with another number of rows, so that
            its samples are not its rows.
    """

    def may_be_samples(part: Any) -> bool:
        return is_list(part) and len(part) == 1 and not lists_are_columns

    def empty(path: KeyPath, leaf: Any) -> Any:
        is_column = isinstance(leaf, Ragged) or is_text(leaf)
        has_rows = isinstance(leaf, Tensor) and leaf.ndim
        if is_column or (has_rows and (samples is None or len(leaf) in (0, 1, samples))):
            return leaf[:0]
        what = type(leaf).__name__ + " without dimensions" * isinstance(leaf, Tensor)
        if has_rows:
            what = f"Tensor of shape {tuple(leaf.shape)}, not of {samples} row(s)"
        if may_be_samples(leaf):
            what += " of one item, which may be a sample"
        msg = "a batch must be tensors with a row for each sample if a rank gets none, but"
        msg += f" `{keystr('batch', path)}` is a {what}: put samples first (batch_first=True), or"
        msg += " pass `microbatch_size` or drop_last=True to make_loader"
        raise TypeError(msg)

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


class DeliveredBatches:
    """The records of the batches that loaders have yielded; see `ReadRecord`.

    A record is found by the ids of all parts of a batch: its tensors, and other objects with weak
    references. A slice or a copy has none. Nothing is kept alive.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[int, ...], tuple[ReadRecord, list[weakref.ref[Any]]]] = {}

    def add(self, batch: Any, read: ReadRecord) -> None:
        """Add the record of `batch`, before the loop gets it."""
        parts = _parts(batch)
        if not parts:
            return
        key = tuple(map(id, parts))
        # The first part that is gone removes the record, before another object can get its id.
        forget = partial(self._records.pop, key)
        self._records[key] = read, [weakref.ref(part, forget) for part in parts]
        if len(self._records) > _MOST:
            self._records.pop(next(iter(self._records)), None)

    def get(self, batch: Any) -> ReadRecord | None:
        """Return the record of `batch`, or of another list, tuple or dict of the same parts."""
        return self._records.get(tuple(map(id, _parts(batch))), (None,))[0]


delivered = DeliveredBatches()


def _parts(batch: Any) -> list[Any]:
    leaves = leaves_with_path(batch, is_leaf=_has_weakrefs)
    return [leaf for _, leaf in leaves if _has_weakrefs(leaf)]


def _has_weakrefs(part: Any) -> bool:
    """Whether this can be weakly referenced: no number, text, list, tuple or dict can."""
    return bool(type(part).__weakrefoffset__)


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
    first = next(iter_tensors(batch), None)
    if read and first is not None and first.shape[:1] == (read,):
        return read  # the usual case
    if is_empty(batch):
        return 0
    shown = _shown(batch)
    if read is None:
        if shown is None:
            raise TypeError(
                f"`batch` must tell how many samples it has, but this {type(batch).__name__} does "
                f"not: pass `count`, or make it a dict whose first tensor has a row for each sample"
            )
        return shown
    if shown not in (read, None) and not (is_list(batch) and len(batch) == read):
        text = "%d samples were read, but `batch` looks like %d: pass `count` if some were dropped"
        _log.warning(text, read, shown, ranks="all", once=True)
    return read


def is_empty(batch: Any) -> bool:
    """Whether `batch` has tensors with dimensions, all of them without rows."""
    first = batch[0] if isinstance(batch, list | tuple) and batch else batch
    if isinstance(first, Tensor) and first.ndim and len(first):  # in a tenth of the time
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
        # In a dict the first one decides. Columns of a tuple that differ in length may be those of
        # a sampled graph, or samples that are sequences.
        is_clear = isinstance(batch, Mapping) or len({*map(len, columns)}) == 1
        return len(columns[0]) if is_clear else None
    # A list may hold one field of all samples, which has one type, or one sample.
    kinds = {(type(part), getattr(part, "dtype", None)) for part in parts}
    is_clear = len(kinds) == 1 and not all(map(is_list, parts))
    return len(parts) if is_clear and _common_rows(parts) in (None, len(parts)) else None


def _common_rows(part: Any) -> int | None:
    """Return the number of rows of the tensors in `part`, if it is the same for all."""
    rows = {len(tensor) for tensor in iter_tensors(part) if tensor.ndim}
    return rows.pop() if len(rows) == 1 else None


class UnevenShares:
    """Warns once of local batches of unequal size in a training forward outside of `backward`."""

    batch_size = 0

    def warn(self) -> None:
        """Log the warning if a training loader has them."""
        if not self.batch_size:
            return
        batch_size, self.batch_size = self.batch_size, 0
        ranks = dist.get_world_size()
        text = f"`batch_size` {batch_size} leaves {ranks} ranks unequal local batches: call "
        text += (
            f"`pardata.backward`, which weights them, or pass a multiple of {ranks} and no `cost`"
        )
        _log.warning(text, ranks=[0], once=True)


uneven_shares = UnevenShares()
