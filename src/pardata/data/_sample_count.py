"""How many samples a batch of any kind has: what the loader read, where nothing speaks against it.

The loader leaves the number on the batch's first tensor as it delivers it (`leave_count`), so that
it goes wherever that tensor goes, and is gone from what is computed of it: a slice, say.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pardata.collective._tree import leaves
from pardata.data._batch import is_list, is_text, tensors_of

_COUNT = "_pardata_samples"  # the attribute of a tensor: a plain number, which pickles


def leave_count(batch: Any, samples: int) -> None:
    """Leave on `batch`, which the loader is about to deliver, how many samples were read for it."""
    first = _first_tensor(batch)
    if first is not None:
        setattr(first, _COUNT, samples)


def samples_read(batch: Any) -> int | None:
    """Return how many samples a loader has read for `batch`, if it has left the number."""
    count: int | None = getattr(_first_tensor(batch), _COUNT, None)
    return count


def samples_of(batch: Any, read: int | None = None) -> int:
    """Return how many samples `batch` has: those that were read for it, which its shape must allow.

    Rows of its columns, or items of its lists, where a loader has left no number, and where a
    ``collate_fn`` has kept fewer samples, or made more of them.

    Args:
        batch: of any kind.
        read: how many samples were read for it, where that is known without the batch.

    Raises:
        TypeError: where it has no tensor with rows, or can be read in several ways.
    """
    first = _first_tensor(batch)
    if read is None:
        read = getattr(first, _COUNT, None)
    if read is not None and first is not None and first.ndim and len(first) == read:
        return read
    tensors = list(tensors_of(batch))
    if read is None and not any(tensor.ndim for tensor in tensors):
        raise TypeError(
            f"`batch` must hold a tensor whose rows are its samples, but a {type(batch).__name__} "
            f"has none: pass `count`"
        )
    if tensors and all(tensor.ndim and not len(tensor) for tensor in tensors):
        return 0  # as the loader makes it for a rank without samples: lists keep their length
    readings = _readings(batch)
    if read is not None:
        columns = {len(tensor) for tensor in tensors if tensor.ndim}
        fewer = {number for number in readings if number < read}
        if not fewer or read in readings | columns:
            return read
        # Samples were left out; unless the read ones stand along another dimension.
        readings = fewer | {read for tensor in tensors if read in tensor.shape}
    if len(readings) != 1:
        found = " or ".join(map(str, sorted(readings)))
        what = f"may be of {found} samples" if found else "has columns of unlike length"
        raise TypeError(
            f"`batch` must tell how many samples it has, but this {type(batch).__name__} {what}: "
            f"pass `count`"
        )
    return readings.pop()


def _first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor in `batch`, soonest where it stands in front."""
    part = batch
    while isinstance(part, list | tuple | dict) and part:
        part = next(iter(part.values())) if isinstance(part, dict) else part[0]
    return part if isinstance(part, Tensor) else next(tensors_of(batch), None)


def _readings(batch: Any) -> set[int]:
    """Return every number of samples that `batch` may have."""
    if isinstance(batch, PackedSequence):
        return set()  # rows of it are elements of all its samples
    if is_list(batch):
        return _of_list(batch)
    if isinstance(batch, Mapping | tuple):
        return _of_columns([*batch.values()] if isinstance(batch, Mapping) else batch)
    # A graph has a tensor of nodes and one of edges; a batch of a class of one's own, columns.
    return _agreed(tensors_of(batch))


def _of_list(batch: Sequence[Any]) -> set[int]:
    """Return the readings of a list or tuple: columns, or samples, or lists of either."""
    if all(isinstance(item, Tensor) for item in batch):
        # Of one kind and of unlike length: an input and a target, or sequences, a sample each.
        either = _are_alike(batch) and len({item.shape[:1] for item in batch}) > 1
        return _readings(batch[0]) | ({len(batch)} if either else set())
    if all(map(_is_object, batch)) or all(isinstance(item, Mapping) for item in batch):
        return {len(batch)} | _agreed(batch)
    if not all(map(is_list, batch)) or len({len(item) for item in batch}) != 1:
        return _of_columns(batch)
    by_field = all(map(_are_alike, batch))  # of all samples
    by_sample = all(map(_are_alike, zip(*batch, strict=True)))
    if by_field == by_sample:
        return {len(batch), len(batch[0])} | _agreed(batch)
    return {len(batch[0] if by_field else batch)} | _agreed(batch)


def _of_columns(columns: Sequence[Any]) -> set[int]:
    """Return the readings of columns: rows of the first with tensors, or items of their lists."""
    first = next((part for part in columns if any(True for _ in tensors_of(part))), None)
    if _is_object(first):
        return _agreed(tensors_of(columns))
    if not is_list(first):
        return _readings(first)
    sizes = {len(part) for part in columns if is_list(part) or _length(part) is not None}
    return _agreed(columns) | (sizes if len(sizes) == 1 else set())


def _agreed(parts: Iterable[Any]) -> set[int]:
    """Return the length of the columns in `parts`, if it is one, and nothing else is in them."""
    found = {_length(leaf) for part in parts for _, leaf in leaves(part, is_leaf=_is_whole)}
    return {length for length in found if length is not None and len(found) == 1}


def _is_whole(part: Any) -> bool:
    """Whether this is a list of texts, which is one column, or of dicts, which has none in it."""
    return is_list(part) and any(isinstance(item, str | bytes | Mapping) for item in part)


def _length(column: Any) -> int | None:
    has_rows = column.ndim > 0 if isinstance(column, Tensor) else is_text(column)
    return len(column) if has_rows else None


def _are_alike(items: Iterable[Any]) -> bool:
    """Whether `items` may be the same field of several samples."""
    kinds = {(item.dtype, item.ndim) if isinstance(item, Tensor) else type(item) for item in items}
    return len(kinds) == 1


def _is_object(part: Any) -> bool:
    """Whether this is of a class of the user's own: a graph, or a batch of its own kind."""
    known = (Tensor, Mapping, list, tuple, str, bytes, int, float)
    return part is not None and not isinstance(part, known)
