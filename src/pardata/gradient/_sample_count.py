"""How many samples a batch of any kind has, as far as that can be told."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pardata.data._batch import tensors_of


def samples_of(batch: Any) -> int:
    """Return how many samples `batch` has: rows of its columns, or items of its lists.

    Raises:
        TypeError: where it has no tensor with rows, or can be read in several ways.
    """
    tensors = list(tensors_of(batch))
    if not any(tensor.ndim for tensor in tensors):
        msg = (
            f"`batch` must hold a tensor whose rows are its samples, but a {type(batch).__name__} "
            f"has none: pass `count`"
        )
        raise TypeError(msg)
    if all(tensor.ndim and not len(tensor) for tensor in tensors):
        return 0  # as the loader makes it for a rank without samples: lists keep their length
    readings = _readings(batch)
    if len(readings) != 1:
        found = " or ".join(map(str, sorted(readings)))
        what = f"may be of {found} samples" if found else "has columns of unlike length"
        msg = (
            f"`batch` must tell how many samples it has, but this {type(batch).__name__} {what}: "
            f"pass `count`"
        )
        raise TypeError(msg)
    return readings.pop()


def _readings(batch: Any) -> set[int]:
    """Return every number of samples that `batch` may have."""
    if isinstance(batch, Tensor):
        return {len(batch)} if batch.ndim else set()
    if isinstance(batch, Mapping):
        return _of_columns(list(batch.values()))
    if isinstance(batch, PackedSequence):
        return set()  # rows of it are elements of all its samples
    if not isinstance(batch, list | tuple):
        # A graph has a tensor of nodes and one of edges; a batch of a class of one's own, columns.
        return _one(_lengths(tensors_of(batch)))
    if hasattr(batch, "_fields"):
        return _of_columns(list(batch))
    return _of_list(batch)


def _of_list(batch: Sequence[Any]) -> set[int]:
    """Return the readings of a list or tuple: columns, or samples, or lists of either."""
    if all(isinstance(item, Tensor) for item in batch):
        # Of one kind and of unlike length: an input and a target, or sequences, a sample each.
        lengths = {len(item) if item.ndim else -1 for item in batch}
        either = len(lengths) > 1 and _are_alike(batch)
        return _readings(batch[0]) | ({len(batch)} if either else set())
    if all(map(_is_object, batch)) or all(isinstance(item, Mapping) for item in batch):
        return {len(batch)} | _one(_lengths(batch))  # objects have none
    if all(map(_is_list, batch)) and len({len(item) for item in batch}) == 1:
        return _of_table(batch)
    return _of_columns(batch)


def _of_table(batch: Sequence[Sequence[Any]]) -> set[int]:
    """Return the readings of equally long lists: a field of all samples each, or a sample each."""
    by_field = all(map(_are_alike, batch))
    by_sample = all(map(_are_alike, zip(*batch, strict=True)))
    readings = _one(_lengths(batch))
    if by_field or not by_sample:
        readings |= {len(batch[0])}
    if by_sample or not by_field:
        readings |= {len(batch)}
    return readings


def _of_columns(columns: Iterable[Any]) -> set[int]:
    """Return the readings of columns: rows of the first with tensors, or items of their lists."""
    columns = list(columns)
    first = next((part for part in columns if next(tensors_of(part), None) is not None), None)
    if not _is_list(first):
        return _one(_lengths(tensors_of(columns))) if _is_object(first) else _readings(first)
    sized = [part for part in columns if _is_list(part) or (isinstance(part, Tensor) and part.ndim)]
    return _one(map(len, sized)) | _one(_lengths(columns))


def _lengths(parts: Iterable[Any]) -> Iterator[int | None]:
    """Yield the length of each column in `parts`, and None for what no column has in it."""
    for part in parts:
        if isinstance(part, Tensor) and part.ndim:
            yield len(part)
        elif isinstance(part, Mapping):
            yield from _lengths(part.values())
        elif _is_list(part) and part and all(isinstance(item, str | bytes) for item in part):
            yield len(part)
        elif _is_list(part) and not any(isinstance(item, Mapping) for item in part):
            yield from _lengths(part)
        else:
            yield None


def _one(lengths: Iterable[int | None]) -> set[int]:
    """Return the length that all agree in, if they do."""
    found = set(lengths)
    return {length for length in found if length is not None and len(found) == 1}


def _are_alike(items: Iterable[Any]) -> bool:
    """Whether `items` may be the same field of several samples."""
    return len({_kind(item) for item in items}) == 1


def _kind(item: Any) -> object:
    return (item.dtype, item.ndim) if isinstance(item, Tensor) else type(item)


def _is_list(part: Any) -> bool:
    return isinstance(part, list | tuple) and not hasattr(part, "_fields")


def _is_object(part: Any) -> bool:
    """Whether this is of a class of the user's own: a graph, or a batch of its own kind."""
    known = (Tensor, Mapping, list, tuple, str, bytes, int, float)
    return part is not None and not isinstance(part, known)
