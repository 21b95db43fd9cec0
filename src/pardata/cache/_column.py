"""A column: one part of all samples, in a file; in another the shapes, if they differ."""

import math
import mmap
import warnings
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from pardata.data._batch_utils import Ragged
from pardata.data._batched_read import take_rows

Shapes: TypeAlias = Sequence[Sequence[int]]  # a part's shape in each of several samples


class Column(NamedTuple):
    """One part of all samples, in tensors over its files, whose pages all processes share.

    Writing to them would end the process: hand out copies only.

    Attributes:
        values: a row for each sample; or, where shapes differ, all values one after another.
        offsets: where shapes differ: a row for each sample, its shape and then its first value.
    """

    values: Tensor
    offsets: Tensor | None

    @classmethod
    def of(cls, path: Path, dtype: torch.dtype, length: int, shape: list[int] | None) -> "Column":
        """Return what is in the files: of this `shape`, or of other shapes in each sample."""
        values = _map_file(path, dtype)
        if shape is not None:
            return cls(values.view(length, *shape), None)
        return cls(values, _map_file(_offsets_path(path), torch.int64).view(length, -1))

    def rows(self, indices: Tensor) -> Tensor | Ragged:
        """Return the parts of several samples."""
        if self.offsets is None:
            return take_rows(self.values, indices)
        return Ragged(map(self._cut, take_rows(self.offsets, indices).tolist()))

    def _cut(self, entry: list[int]) -> Tensor:
        *shape, first = entry
        return self.values[first : first + math.prod(shape)].view(shape).clone()


class ColumnWriter:
    """One part of all samples, written as they come."""

    def __init__(self, path: Path) -> None:
        self._values, self._offsets = path.open("wb"), _offsets_path(path).open("wb")
        self._first = 0  # the number of values so far
        self._shapes: set[tuple[int, ...]] = set()

    def close(self) -> None:
        """Close the files."""
        self._values.close()
        self._offsets.close()

    def add(self, values: bytes, shapes: Shapes) -> None:
        """Write the values of the next samples, which have these shapes."""
        self._shapes.update(map(tuple, shapes))
        offsets = array("q")
        for shape in shapes:
            offsets.extend((*shape, self._first))
            self._first += math.prod(shape)
        self._values.write(values)
        offsets.tofile(self._offsets)

    def finish(self) -> Sequence[int] | None:
        """Return the shape that all samples have, so that no offsets are needed; or None."""
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
        # A private mapping could be written to, but Linux refuses one larger than the memory.
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, that it knows no read-only tensors
        return torch.frombuffer(pages, dtype=dtype)
