"""Reads a batch in one indexing operation, if the dataset allows it.

Does not apply to subclasses of ``TensorDataset`` and ``Subset`` that override ``__getitem__``.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from pardata.data._mixture import Mixture
from pardata.environment._device import without_wait

# --- the parts of a dataset, and the default device


def datasets_in(dataset: Any) -> Iterator[Any]:
    """Yield a dataset, and those inside a ``Subset``, ``ConcatDataset`` or `Mixture`."""
    yield dataset
    if isinstance(dataset, Subset):
        yield from datasets_in(dataset.dataset)
    elif isinstance(dataset, ConcatDataset | Mixture):
        for joined in dataset.datasets:
            yield from datasets_in(joined)


def cpu_default_device() -> AbstractContextManager[Any]:
    """Make the CPU the default device in a block, after any ``torch.set_default_device``."""
    is_cpu = torch.empty(0).is_cpu  # takes a tenth of the time of torch.get_default_device
    return nullcontext() if is_cpu else torch.device("cpu")


# --- functions that return a batch as `default_collate` would


# From indices, int64 of shape (n,), to the batch.
ReadRows: TypeAlias = Callable[[Tensor], Any]


class BatchReadable(Dataset[Any]):
    """A dataset with a method that reads a whole batch, as those of `cache_dataset`."""

    @abstractmethod
    def read_batch(self, indices: Tensor) -> Any:
        """Return the batch that ``default_collate`` would make of the samples at `indices`.

        Parts whose shapes differ, for which it would raise, become a `Ragged`.
        """


def batch_reader(dataset: Any) -> ReadRows | None:
    """Return a function that reads a whole batch of `dataset`, or None.

    Not for a subclass of ``TensorDataset`` or ``Subset`` that overrides how it is indexed.
    """
    # Partial functions, which are pickled for spawned workers, as closures cannot be.
    if isinstance(dataset, BatchReadable):
        return dataset.read_batch
    if _reads_as(dataset, TensorDataset):
        return partial(_columns, dataset)
    if _reads_as(dataset, Subset) and (inner := batch_reader(dataset.dataset)) is not None:
        chosen = torch.as_tensor(dataset.indices, dtype=torch.int64, device="cpu")
        return partial(_chosen, inner, chosen)
    return None


def has_getitems(dataset: object) -> bool:
    """Whether `dataset` has ``__getitems__``; of a Subset, whether its dataset has."""
    if isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        return has_getitems(dataset.dataset)
    return hasattr(dataset, "__getitems__")


def take_rows(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return ``tensor[indices]``, of shape (len(indices), …), by the faster ``index_select``."""
    if tensor.device != indices.device:
        # On a GPU an index out of range would be a device-side assertion, which ends the process.
        indices = without_wait(_from_the_front(indices, len(tensor)), tensor.device)
    try:
        return tensor.index_select(0, indices)
    # An index is negative or out of range; or the dtype is unsigned, which torch 2.11 lacks.
    except (IndexError, NotImplementedError):
        return tensor[indices]


def _reads_as(dataset: object, kind: type) -> bool:
    cls, ways = type(dataset), ("__getitem__", "__getitems__")
    are_kinds = (getattr(cls, way, None) is getattr(kind, way, None) for way in ways)
    return isinstance(dataset, kind) and all(are_kinds)


def _columns(dataset: TensorDataset, indices: Tensor) -> Any:
    # Read at each call, because a worker_init_fn may replace the tensors.
    return [take_rows(tensor, indices) for tensor in dataset.tensors]


def _chosen(inner: ReadRows, chosen: Tensor, indices: Tensor) -> Any:
    return inner(chosen[indices])


def _from_the_front(indices: Tensor, length: int) -> Tensor:
    """Return `indices` with negative ones replaced by positive ones."""
    outside = (indices < -length) | (indices >= length)
    if outside.any():
        raise IndexError(f"index {indices[outside][0]} is out of range for {length} samples")
    return torch.where(indices < 0, indices + length, indices)
