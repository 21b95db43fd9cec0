"""What is done to a whole batch, whatever `collate_fn` made it of."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pardata.collective._tree import Path, leaves, mapped


def moved(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`, asynchronously where they are pinned.

    An object of another kind is moved by its own ``to``, if it has one.
    """
    if device.type == "cpu":
        return batch
    return _changed(
        batch,
        lambda tensor: tensor.to(device, non_blocking=True),
        lambda other: other.to(device) if hasattr(other, "to") else other,
    )


def pinned(batch: Any) -> Any:
    """Return `batch` with its tensors in pinned memory, but for those that are on a GPU already.

    An object of another kind is pinned by its own ``pin_memory``, if it has one.
    """
    return _changed(
        batch,
        lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor,
        lambda other: other.pin_memory() if hasattr(other, "pin_memory") else other,
    )


def rows_of(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return ``tensor[indices]``, which takes ten times as long as picking rows from the front."""
    if tensor.device != indices.device:
        # A GPU does not say that an index is out of range: it stops, and the process with it.
        indices = _from_the_front(indices, len(tensor)).to(tensor.device)
    if indices.ndim == 1:
        try:
            return tensor.index_select(0, indices)
        except IndexError:  # negative, or indeed out of range
            pass
    return tensor[indices]


def _from_the_front(indices: Tensor, length: int) -> Tensor:
    outside = (indices < -length) | (indices >= length)
    if outside.any():
        msg = f"index {indices[outside][0]} is out of range for {length} samples"
        raise IndexError(msg)
    return torch.where(indices < 0, indices + length, indices)


def emptied(batch: Any) -> Any:
    """Return `batch` with no rows: every tensor cut to ``[:0]``, every list of strings to ``[]``.

    Raises:
        TypeError: for a batch that holds something else, of which nobody knows the rows.
    """
    return _changed(batch, _without_rows, _empty_other)


def assembled(batches: Sequence[Any], places: Tensor) -> Any:
    """Return one batch of the rows of `batches`, in their order put at `places`."""
    columns = [dict(leaves(batch)) for batch in batches]

    def put(path: Path, _: Any) -> Tensor:
        rows = torch.cat([column[path] for column in columns])
        return torch.empty_like(rows).index_copy_(0, places.to(rows.device), rows)

    return mapped(batches[0], put)


def tensors_of(batch: Any, seen: dict[int, Any] | None = None) -> Iterator[Tensor]:
    """Yield every tensor in `batch`, however it is nested, and in the attributes of its objects."""
    seen = {} if seen is None else seen  # what it holds lives on: another might get its number
    for _, leaf in leaves(batch, is_leaf=lambda part: hasattr(part, "__dict__")):
        if id(leaf) in seen:
            continue
        seen[id(leaf)] = leaf
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            # Of a collection too: Microbatches hold a stand-in beside what they are made of.
            yield from tensors_of([vars(leaf), _items(leaf)], seen)


def _items(collection: Any) -> list[Any]:
    if isinstance(collection, Mapping):
        return list(collection.values())
    return list(collection) if isinstance(collection, Sequence) else []


def _changed(
    batch: Any, on_tensor: Callable[[Tensor], Tensor], on_other: Callable[[Any], Any]
) -> Any:
    """Return `batch` with its tensors, and what is neither tensor nor collection, changed."""

    def change(_: Path, leaf: Any) -> Any:
        return on_tensor(leaf) if isinstance(leaf, Tensor) else on_other(leaf)

    return mapped(batch, change, is_leaf=_is_whole)


def _is_whole(batch: Any) -> bool:
    """Whether this is no collection of parts, but text or a tensor in disguise."""
    return isinstance(batch, PackedSequence) or _is_text(batch)


def _is_text(batch: Any) -> bool:
    """Whether this is what the default `collate_fn` makes of strings: one for each row."""
    return (
        isinstance(batch, list | tuple)
        and not hasattr(batch, "_fields")
        and len(batch) > 0
        and all(isinstance(item, str | bytes) for item in batch)
    )


def _without_rows(tensor: Tensor) -> Tensor:
    return tensor[:0] if tensor.ndim else _refuse(tensor)


def _empty_other(item: Any) -> Any:
    return item[:0] if _is_text(item) else _refuse(item)


def _refuse(item: Any) -> NoReturn:
    what = f"{type(item).__name__}{' without dimensions' if isinstance(item, Tensor) else ''}"
    msg = (
        f"a batch must be made of tensors, dicts, lists and tuples for a rank to get none of its "
        f"rows, but this one holds a {what}: use drop_last=True, or a batch "
        f"size that leaves every rank a sample"
    )
    raise TypeError(msg)
