"""Reading a whole batch in one operation, from data sets that allow it."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from pardata.data._batch import assembled, rows_of

Read: TypeAlias = Callable[[Tensor], Any]


class ReadsBatches(Dataset[Any]):
    """What can read a whole batch itself: the data sets of `cache_dataset`."""

    @abstractmethod
    def read_batch(self, indices: Tensor) -> Any:
        """Return the batch that ``default_collate`` would make of the samples at `indices`."""


def whole_batch_reader(dataset: Any) -> Read | None:
    """Return a function from the indices of samples to their batch, or None if there is none.

    The batch is what ``default_collate`` would make of the samples. Only for data sets whose own
    way of reading is known: a subclass that has its own is left alone.
    """
    if isinstance(dataset, ReadsBatches):
        return dataset.read_batch
    if _reads_as(dataset, TensorDataset):
        return _Columns(dataset)
    if _reads_as(dataset, Subset):
        if (inner := whole_batch_reader(dataset.dataset)) is None:
            return None
        return _Chosen(inner, torch.as_tensor(dataset.indices, dtype=torch.int64))
    if _reads_as(dataset, ConcatDataset):
        readers = [reader for part in dataset.datasets if (reader := whole_batch_reader(part))]
        whole = len(readers) == len(dataset.datasets)
        return _Joined(readers, dataset.cumulative_sizes) if whole else None
    return None


def _reads_as(dataset: object, kind: type) -> bool:
    own = type(dataset)
    return isinstance(dataset, kind) and all(
        getattr(own, name, None) is getattr(kind, name, None)
        for name in ("__getitem__", "__getitems__")
    )


# Classes and not closures: a worker that is spawned gets them pickled.


@dataclass(frozen=True)
class _Columns:
    dataset: TensorDataset  # and not its tensors: a worker_init_fn may put others there

    def __call__(self, indices: Tensor) -> Any:
        return [rows_of(tensor, indices) for tensor in self.dataset.tensors]


@dataclass(frozen=True)
class _Chosen:
    inner: Read
    chosen: Tensor

    def __call__(self, indices: Tensor) -> Any:
        return self.inner(self.chosen[indices])


@dataclass(frozen=True)
class _Joined:
    readers: list[Read]
    ends: list[int]

    def __call__(self, indices: Tensor) -> Any:
        length = self.ends[-1]
        outside = (indices < -length) | (indices >= length)
        if outside.any():
            msg = f"index {indices[outside][0]} is out of range for {length} samples"
            raise IndexError(msg)
        indices = indices % length  # the negative ones count from the end
        parts, places = [], []
        owners = torch.bucketize(indices, torch.tensor(self.ends), right=True)
        for number in owners.unique().tolist():
            rows = (owners == number).nonzero()[:, 0]
            start = self.ends[number - 1] if number else 0
            parts.append(self.readers[number](indices[rows] - start))
            places.append(rows)
        return parts[0] if len(parts) == 1 else assembled(parts, torch.cat(places))


def is_read_whole(dataset: object) -> bool:
    """Whether a batch of `dataset` is one operation and not a loop over samples."""
    if whole_batch_reader(dataset) is not None:
        return True
    if isinstance(dataset, Subset):  # has __getitems__ whatever it is a subset of
        return is_read_whole(dataset.dataset)
    return hasattr(dataset, "__getitems__")
