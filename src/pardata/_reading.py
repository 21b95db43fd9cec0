"""Reading samples, and saying which one could not be read."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset, Subset, TensorDataset


class Reader(Dataset[Any]):
    """A data set as the loader's workers see it: errors name the sample and the rank."""

    def __init__(self, dataset: Any, rank: int) -> None:
        self.dataset = dataset
        self._rank = rank
        self._whole_batches = hasattr(dataset, "__getitems__") and is_vectorised(dataset)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return the samples at `indices`, for ``collate_fn``."""
        if self._whole_batches:
            return self._read(self.dataset.__getitems__, indices)
        return [self._read(self.dataset.__getitem__, index) for index in indices]

    def __getattr__(self, name: str) -> Any:
        # A worker_init_fn finds this object at get_worker_info().dataset.
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_whole_batches" in self.__dict__:  # there, it means the data set
            setattr(self.dataset, name, value)
        else:
            super().__setattr__(name, value)

    def _read(self, get: Any, index: Any) -> Any:
        try:
            return get(index)
        except Exception as error:  # user code: whatever it raises, say where
            what = f"sample {index}" if not isinstance(index, Sequence) else f"samples {index}"
            msg = f"{what} could not be read on rank {self._rank}: {type(error).__name__}: {error}"
            raise RuntimeError(msg) from error


def is_vectorised(dataset: object) -> bool:
    """Whether a whole batch of `dataset` is one operation and not a loop over samples."""
    if isinstance(dataset, Subset):  # has __getitems__ whatever it is a subset of
        return is_vectorised(dataset.dataset)
    return isinstance(dataset, TensorDataset) or hasattr(dataset, "__getitems__")
