"""Whole batches: read in one operation where the dataset allows it, moved, pinned and emptied."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from pardata.ranks._device import has_streams
from pardata.values._tree import TreePath, in_brackets, leaves, mapped

# --- looked at: whether a dataset is still what it was, and where tensors are made


def layers(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and those that it is a part, or made, of."""
    yield dataset
    if isinstance(dataset, Subset):
        yield from layers(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from layers(part)


def outline(dataset: Any) -> list[Any]:
    """Return what differs once its length, an attribute, or a Subset's indices changed."""
    # By its number, and kept, so that no other object gets that.
    held = [value for own in layers(dataset) for value in getattr(own, "__dict__", {}).values()]
    picked = (own.indices for own in layers(dataset) if isinstance(own, Subset))
    lists = [[*indices] for indices in picked if isinstance(indices, list)]
    length = None if isinstance(dataset, IterableDataset) else len(dataset)
    return [length, *((id(value), value) for value in held), *lists]


def on_cpu() -> AbstractContextManager[Any]:
    """Make tensors on the CPU in a block, whatever ``torch.set_default_device`` was told."""
    is_there = torch.empty(0).is_cpu  # a tenth of the time of torch.get_default_device
    return nullcontext() if is_there else torch.device("cpu")


# --- read: the batch that `default_collate` would make of the samples


# From the indices of samples to their batch.
Read: TypeAlias = Callable[[Tensor], Any]


class Ragged(list[Any]):
    """A column of a batch whose rows differ in shape: an item for each sample."""


class ReadsBatches(Dataset[Any]):
    """What can read a whole batch itself: the datasets of `cache_dataset`."""

    @abstractmethod
    def read_batch(self, indices: Tensor) -> Any:
        """Return the batch that ``default_collate`` would make of the samples at `indices`.

        Of parts whose shapes differ, which it would refuse, the batch has a `Ragged`.
        """


def whole_batch_reader(dataset: Any) -> Read | None:
    """Return what reads a whole batch, or None if there is nothing that could.

    Only for datasets whose own way of reading is known: a subclass that has its own is left alone.
    """
    # Partial functions and not closures: a worker that is spawned gets them pickled.
    if isinstance(dataset, ReadsBatches):
        return dataset.read_batch
    if _reads_as(dataset, TensorDataset):
        return partial(_columns, dataset)
    if _reads_as(dataset, Subset) and (inner := whole_batch_reader(dataset.dataset)) is not None:
        chosen = torch.as_tensor(dataset.indices, dtype=torch.int64, device="cpu")
        return partial(_chosen, inner, chosen)
    if _reads_as(dataset, ConcatDataset):
        readers = [reader for part in dataset.datasets if (reader := whole_batch_reader(part))]
        if len(readers) == len(dataset.datasets):
            return partial(_joined, readers, dataset.cumulative_sizes)
    return None


def is_read_whole(dataset: object) -> bool:
    """Whether a batch of `dataset` is one operation and not a loop over samples."""
    if whole_batch_reader(dataset) is not None:
        return True
    if isinstance(dataset, Subset):  # has __getitems__ whatever it is a subset of
        return is_read_whole(dataset.dataset)
    return hasattr(dataset, "__getitems__")


# Of unsigned numbers torch 2.6 picks no rows.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def rows_of(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return ``tensor[indices]``, which takes ten times as long as picking rows from the front."""
    if tensor.device != indices.device:
        # A GPU does not say that an index is out of range: it stops, and the process with it.
        indices = _from_the_front(indices, len(tensor))
        if queued := has_streams(tensor.device):
            indices = indices.pin_memory()  # so that nobody waits for the copy
        indices = indices.to(tensor.device, non_blocking=queued)
    if (signed := _SIGNED.get(tensor.dtype)) is not None:
        return rows_of(tensor.view(signed), indices).view(tensor.dtype)
    try:
        return tensor.index_select(0, indices)
    except IndexError:  # negative, or indeed out of range
        return tensor[indices]


def _reads_as(dataset: object, kind: type) -> bool:
    own, ways = type(dataset), ("__getitem__", "__getitems__")
    is_kinds = (getattr(own, way, None) is getattr(kind, way, None) for way in ways)
    return isinstance(dataset, kind) and all(is_kinds)


def _columns(dataset: TensorDataset, indices: Tensor) -> Any:
    # It is asked for its tensors here, as a worker_init_fn may put others there.
    return [rows_of(tensor, indices) for tensor in dataset.tensors]


def _chosen(inner: Read, chosen: Tensor, indices: Tensor) -> Any:
    return inner(chosen[indices])


def _joined(readers: list[Read], ends: list[int], indices: Tensor) -> Any:
    indices = _from_the_front(indices, ends[-1])
    parts, places = [], []
    owners = torch.bucketize(indices, torch.tensor(ends, device="cpu"), right=True)
    for number in owners.unique().tolist():
        rows = (owners == number).nonzero()[:, 0]
        start = ends[number - 1] if number else 0
        parts.append(readers[number](indices[rows] - start))
        places.append(rows)
    if len(parts) == 1:
        return parts[0]
    columns, order = [dict(leaves(one, is_leaf=_is_ragged)) for one in parts], torch.cat(places)
    if any(own.keys() != columns[0].keys() for own in columns):
        raise ValueError("the datasets of a ConcatDataset must return the same parts, but differ")
    order = order.argsort()

    def put_together(path: TreePath, _: Any) -> Any:
        own = [column[path] for column in columns]
        if not any(map(_is_ragged, own)):
            return rows_of(torch.cat(own), order)
        rows = [*chain.from_iterable(own)]
        return Ragged(rows[i] for i in order.tolist())

    return mapped(parts[0], put_together, is_leaf=_is_ragged)


def _is_ragged(part: Any) -> bool:
    return isinstance(part, Ragged)


def _from_the_front(indices: Tensor, length: int) -> Tensor:
    """Return `indices` with the negative ones, which count from the end, as they are from there."""
    outside = (indices < -length) | (indices >= length)
    if outside.any():
        raise IndexError(f"index {indices[outside][0]} is out of range for {length} samples")
    return torch.where(indices < 0, indices + length, indices)


# --- changed, whatever `collate_fn` made the batch of


def moved(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`; for a GPU asynchronously, where they are pinned.

    An object of another kind is moved by its own ``to``, if it has one.
    """

    def move(_: TreePath, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            # Without streams a copy that nobody waits for may read what is no longer there.
            return leaf.to(device, non_blocking=has_streams(device))
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return batch if device.type == "cpu" else mapped(batch, move, is_leaf=_is_whole)


def pinned(batch: Any) -> Any:
    """Return `batch` with its tensors in pinned memory, but for those that are on a GPU already.

    An object of another kind is pinned by its own ``pin_memory``, if it has one.
    """

    def pin(_: TreePath, leaf: Any) -> Any:
        stays = isinstance(leaf, Tensor) and leaf.device.type != "cpu"
        return leaf if stays or not hasattr(leaf, "pin_memory") else leaf.pin_memory()

    return mapped(batch, pin, is_leaf=_is_whole)


def emptied(batch: Any, *, lists_are_columns: bool) -> Any:
    """Return `batch`, of one sample, with none: each tensor cut to ``[:0]``, strings to ``[]``.

    Args:
        batch: as the loop would get it.
        lists_are_columns: as those of ``default_collate``. In another batch a list of one item may
            as well be one of samples (images of unlike sizes, say), which keep their rows.

    Raises:
        TypeError: for a batch that holds something else, of which nobody knows the rows.
    """

    def may_be_samples(part: Any) -> bool:
        return is_list(part) and len(part) == 1 and not lists_are_columns

    def empty(path: TreePath, leaf: Any) -> Any:
        is_tensor = isinstance(leaf, Tensor)
        if _is_ragged(leaf) or is_text(leaf) or (is_tensor and leaf.ndim):
            return leaf[:0]
        what = f"{type(leaf).__name__}{' without dimensions' if is_tensor else ''}"
        if may_be_samples(leaf):
            what += " of one item, which may be a sample"
        raise TypeError(
            f"a batch must be made of tensors, dicts, lists and tuples for a rank to get none of "
            f"its rows, but `{in_brackets('batch', path)}` is a {what}: evaluate over "
            f"Microbatches, of which a rank may have none (pass `microbatch_size`), or use "
            f"drop_last=True, or a batch size that leaves every rank a sample"
        )

    def is_leaf(part: Any) -> bool:
        return _is_ragged(part) or _is_whole(part) or may_be_samples(part)

    return mapped(batch, empty, is_leaf=is_leaf)


def _is_whole(batch: Any) -> bool:
    """Whether this is no collection of parts, but text or a tensor in disguise."""
    return isinstance(batch, PackedSequence) or is_text(batch)


# --- looked through


def is_list(part: Any) -> bool:
    """Whether this is a list or a tuple, but no named one."""
    return isinstance(part, list | tuple) and not hasattr(part, "_fields")


def is_text(part: Any) -> bool:
    """Whether this is what the default `collate_fn` makes of strings: one for each row."""
    return is_list(part) and all(isinstance(item, str | bytes) for item in part)


def tensors_of(batch: Any, seen: dict[int, Any] | None = None) -> Iterator[Tensor]:
    """Yield every tensor in `batch`, however it is nested, and in the attributes of its objects."""
    seen = {} if seen is None else seen  # what it holds lives on: another might get its number
    for _, leaf in leaves(batch, is_leaf=lambda part: hasattr(part, "__dict__")):
        if id(leaf) in seen:
            continue
        seen[id(leaf)] = leaf
        if isinstance(leaf, Tensor):
            yield leaf
        else:
            yield from tensors_of(_inside(leaf), seen)


def _inside(part: Any) -> list[Any]:
    """Return what is in the attributes of an object, and in it if it is a collection too."""
    found = list(getattr(part, "__dict__", {}).values())
    slots = (name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ()))
    found += [getattr(part, name) for name in slots if hasattr(part, name)]
    # Microbatches, say, hold a placeholder next to what they are made of.
    is_own = isinstance(part, Sequence) and hasattr(part, "__dict__")
    if is_own or isinstance(part, set | frozenset):
        found += part
    return found + list(part.values()) if isinstance(part, Mapping) else found
