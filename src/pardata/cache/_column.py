"""A column: one part of all samples in a file, and a second file of shapes if they differ."""

import math
import mmap
import warnings
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pardata.data._batch import Ragged
from pardata.data._batched_read import take_rows

Shapes: TypeAlias = Sequence[Sequence[int]]  # a part's shape in each of several samples


class Column(NamedTuple):
    """One part of all samples, memory-mapped, so that all processes of a node share the pages.

    The mapping is read-only, and a write would end the process. So `rows` returns copies.

    Attributes:
        values: of shape (samples, *shape); if shapes differ, all values in one dimension.
        offsets: of shape (samples, dimensions + 1), if shapes differ: in each row the shape of a
            sample and the index of its first value in `values`.
    """

    values: Tensor
    offsets: Tensor | None

    @classmethod
    def of(cls, path: Path, dtype: torch.dtype, length: int, shape: list[int] | None) -> "Column":
        """Map the files: with samples of one `shape`, or of different shapes if it is None."""
        values = _map_file(path, dtype)
        if shape is not None:
            return cls(values.view(length, *shape), None)
        return cls(values, _map_file(_offsets_path(path), torch.int64).view(length, -1))

    def rows(self, indices: Tensor) -> Tensor | Ragged:
        """Return the rows of several samples, of shape (len(indices), *shape)."""
        if self.offsets is None:
            return take_rows(self.values, indices)
        return Ragged(map(self._cut, take_rows(self.offsets, indices).tolist()))

    def _cut(self, entry: list[int]) -> Tensor:
        *shape, first = entry
        return self.values[first : first + math.prod(shape)].view(shape).clone()


class ColumnWriter:
    """Writes one part of all samples, in the order of `add`."""

    def __init__(self, path: Path) -> None:
        self._values, self._offsets = path.open("wb"), _offsets_path(path).open("wb")
        self._first = 0  # the number of values so far
        self._shapes: set[tuple[int, ...]] = set()

    def close(self) -> None:
        """Close the files."""
        self._values.close()
        self._offsets.close()

    def add(self, values: bytes, shapes: Shapes) -> None:
        """Write the values of the next samples and their shapes."""
        self._shapes.update(map(tuple, shapes))
        offsets = array("q")
        for shape in shapes:
            offsets.extend((*shape, self._first))
            self._first += math.prod(shape)
        self._values.write(values)
        offsets.tofile(self._offsets)

    def finish(self) -> Sequence[int] | None:
        """Return the shape of all samples, without offsets, or None if shapes differ."""
        if len(self._shapes) > 1:
            return None
        Path(self._offsets.name).unlink()
        return self._shapes.pop()


def _offsets_path(path: Path) -> Path:
    return path.with_suffix(".places.bin")


def _map_file(path: Path, dtype: torch.dtype) -> Tensor:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return torch.empty(0, dtype=dtype, device="cpu")
    with path.open("rb") as file:
        # A private mapping would be writable, but Linux refuses one larger than the memory.
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that it has no read-only tensors
        return torch.frombuffer(pages, dtype=dtype)
