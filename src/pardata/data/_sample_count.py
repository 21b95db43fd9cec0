"""How many samples a batch has: what a loader has read for it, else its rows, or its items.

And a warning where the gradients of uneven shares are averaged as if they were even.
"""

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pardata._pytree import leaves_with_path
from pardata.data._batch_utils import is_list, is_text, iter_tensors
from pardata.environment._logger import get_logger

_log = get_logger(__name__)

_MOST = 8  # batches that are known by one object, as by the first sample of an in-memory dataset


class ReadRecord(NamedTuple):
    """What a loader knows of a batch: how many samples it has read, and how many ranks share it."""

    samples: int
    size: int


class DeliveredBatches:
    """What loaders have delivered, as long as it lives: a batch is known by what is in it.

    Lists and dicts have no weak references, and who takes ``x, y`` out of one makes another. So the
    columns of a batch lead to the identities of its parts. Nothing is kept alive.
    """

    def __init__(self) -> None:
        # By the identity of a column, of each batch that has it: what was read, and whether some of
        # its columns tell it too.
        self._batches: dict[int, tuple[weakref.ref[Any], dict[int, tuple[ReadRecord, bool]]]] = {}

    def add(self, batch: Any, read: ReadRecord) -> None:
        """Take down what was read for `batch`, which the loop is about to get."""
        key, columns = _key(batch), _columns(batch)
        are_samples = is_list(batch) and len(batch) == read.samples and _are_alike(batch)
        for column in columns[:1] if are_samples else columns:
            if (number := id(column)) not in self._batches:
                self._batches[number] = weakref.ref(column, partial(self._batches.pop, number)), {}
            batches = self._batches[number][1]
            batches.pop(key, None)  # the newest is the last
            batches[key] = read, not are_samples
            if len(batches) > _MOST:
                del batches[next(iter(batches))]

    def get(self, batch: Any) -> ReadRecord | None:
        """Return what was read for `batch`, if a loader has delivered it, or more columns of it."""
        held = [self._batches.get(id(column), (None, {}))[1] for column in _columns(batch)]
        if not held:
            return None
        read, _ = held[0].get(_key(batch), (None, False))
        common = (
            held[0][key][0]
            for key in reversed(held[0])
            if held[0][key][1] and all(key in batches for batches in held)
        )
        return read or next(common, None)


delivered = DeliveredBatches()


def _key(batch: Any) -> int:
    """Return a hash of the identities of what `batch` holds."""
    if isinstance(batch, list | tuple):
        return hash(tuple(map(id, batch)))
    return hash(tuple(map(id, batch.values()))) if isinstance(batch, dict) else hash((id(batch),))


def _columns(batch: Any) -> list[Any]:
    """Return the first tensor or object of each part of `batch`."""
    parts = [*batch.values()] if isinstance(batch, dict) else batch
    firsts = map(_first, parts[:_MOST] if isinstance(parts, list | tuple) else [batch])
    return [first for first in firsts if type(first).__weakrefoffset__]  # no numbers, no texts


def _first(batch: Any) -> Any:
    """Return the first tensor or object in `batch`; it takes least time if that is in front."""
    part = batch
    while isinstance(part, list | tuple | dict) and part:
        part = next(iter(part.values())) if isinstance(part, dict) else part[0]
    if type(part).__weakrefoffset__:
        return part
    candidates = (leaf for _, leaf in leaves_with_path(batch) if type(leaf).__weakrefoffset__)
    return next(candidates, None)


def num_samples(batch: Any, read: int | None = None) -> int:
    """Return how many samples `batch` has: what was read for it, else rows or items.

    It has none if all its tensors are without rows, whatever was read for it.

    Args:
        batch: of any kind.
        read: how many samples were read for it, unless it is among those that were delivered.

    Raises:
        TypeError: where no loader has read it, and it does not tell.
    """
    if (record := delivered.get(batch)) is not None:
        read = record.samples
    first = _first(batch)
    if read and isinstance(first, Tensor) and first.shape[:1] == (read,):
        return read  # most are of this kind
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
    """Whether `batch` has tensors with dimensions, of which none has a row."""
    first = _first(batch)
    if isinstance(first, Tensor) and first.numel():
        return False
    sized = [tensor for tensor in iter_tensors(batch) if tensor.ndim]
    return bool(sized) and not any(map(len, sized))


def _shown(batch: Any) -> int | None:
    """Return the rows of the first tensor of `batch`, or the items of its lists, if it tells."""
    if isinstance(batch, PackedSequence):
        return None  # its rows are elements of all its samples
    if isinstance(batch, Tensor) or not isinstance(batch, Mapping | list | tuple):
        return _common_rows(batch)  # a graph has a tensor of nodes and one of edges
    parts = [*batch.values()] if isinstance(batch, Mapping) else batch
    columns = [part for part in parts if is_text(part) or (isinstance(part, Tensor) and part.ndim)]
    if columns:
        # All of one kind and of unlike length: sequences, a sample each, as well as columns.
        is_clear = not is_list(batch) or len(columns) < len(parts) or not _are_alike(columns)
        return len(columns[0]) if is_clear or len({*map(len, columns)}) == 1 else None
    # A list may be all of one field, or a sample: nobody can tell.
    is_clear = _are_alike(parts) and not all(map(is_list, parts))
    return len(parts) if is_clear and _common_rows(parts) in (None, len(parts)) else None


def _common_rows(part: Any) -> int | None:
    """Return the rows of all tensors in `part`, if those are equally many."""
    rows = {len(tensor) for tensor in iter_tensors(part) if tensor.ndim}
    return rows.pop() if len(rows) == 1 else None


def _are_alike(items: Iterable[Any]) -> bool:
    """Whether `items` may be the same field of several samples."""
    kinds = {(item.dtype, item.ndim) if isinstance(item, Tensor) else type(item) for item in items}
    return len(kinds) == 1


class UnevenShares:
    """The batch size of a training loader whose shares are uneven; 0 if nobody is to be warned."""

    batch_size = 0

    def warn(self) -> None:
        """Say once that a training forward outside of `backward` does not weight them."""
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
