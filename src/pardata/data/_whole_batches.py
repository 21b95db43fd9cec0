"""Whole batches: read in one operation if the dataset allows it."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from pardata.environment._device import without_wait

# --- looked at: whether a dataset is still what it was, and where tensors are made


def layers(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and those that it is a part, or made, of."""
    yield dataset
    if isinstance(dataset, Subset):
        yield from layers(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for joined in dataset.datasets:
            yield from layers(joined)


def outline(dataset: Any) -> list[Any]:
    """Return what differs once its length, an attribute, or a Subset's indices changed."""
    # By its number, and kept, so that no other object gets that.
    held = [value for layer in layers(dataset) for value in getattr(layer, "__dict__", {}).values()]
    picked = (layer.indices for layer in layers(dataset) if isinstance(layer, Subset))
    lists = [[*indices] for indices in picked if isinstance(indices, list)]
    length = None if isinstance(dataset, IterableDataset) else len(dataset)
    return [length, *((id(value), value) for value in held), *lists]


def on_cpu() -> AbstractContextManager[Any]:
    """Make tensors on the CPU in a block, whatever ``torch.set_default_device`` was told."""
    is_there = torch.empty(0).is_cpu  # a tenth of the time of torch.get_default_device
    return nullcontext() if is_there else torch.device("cpu")


# --- read: the batch that `default_collate` would make of the samples


# From the indices of samples to their batch.
ReadRows: TypeAlias = Callable[[Tensor], Any]


class ReadsBatches(Dataset[Any]):
    """What can read a whole batch itself: the datasets of `cache_dataset`."""

    @abstractmethod
    def read_batch(self, indices: Tensor) -> Any:
        """Return the batch that ``default_collate`` would make of the samples at `indices`.

        Of parts whose shapes differ, which it would refuse, the batch has a `Ragged`.
        """


def whole_batch_reader(dataset: Any) -> ReadRows | None:
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
    return None


def has_getitems(dataset: object) -> bool:
    """Whether `dataset` reads many samples at once; a Subset has the method whatever it is of."""
    if isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        return has_getitems(dataset.dataset)
    return hasattr(dataset, "__getitems__")


# torch 2.9 picks no rows of unsigned numbers.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def rows_of(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return ``tensor[indices]``, which takes ten times as long as picking rows from the front."""
    if tensor.device != indices.device:
        # A GPU does not say that an index is out of range: it stops, and the process with it.
        indices = without_wait(_from_the_front(indices, len(tensor)), tensor.device)
    if (signed := _SIGNED.get(tensor.dtype)) is not None:
        return rows_of(tensor.view(signed), indices).view(tensor.dtype)
    try:
        return tensor.index_select(0, indices)
    except IndexError:  # negative, or indeed out of range
        return tensor[indices]


def _reads_as(dataset: object, kind: type) -> bool:
    cls, ways = type(dataset), ("__getitem__", "__getitems__")
    are_kinds = (getattr(cls, way, None) is getattr(kind, way, None) for way in ways)
    return isinstance(dataset, kind) and all(are_kinds)


def _columns(dataset: TensorDataset, indices: Tensor) -> Any:
    # It is asked for its tensors here, as a worker_init_fn may put others there.
    return [rows_of(tensor, indices) for tensor in dataset.tensors]


def _chosen(inner: ReadRows, chosen: Tensor, indices: Tensor) -> Any:
    return inner(chosen[indices])


def _from_the_front(indices: Tensor, length: int) -> Tensor:
    """Return `indices` with the negative ones, which count from the end, as they are from there."""
    outside = (indices < -length) | (indices >= length)
    if outside.any():
        raise IndexError(f"index {indices[outside][0]} is out of range for {length} samples")
    return torch.where(indices < 0, indices + length, indices)
