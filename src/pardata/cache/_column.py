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
from pardata.data._batched_read import rows_of

Shapes: TypeAlias = Sequence[Sequence[int]]  # a part's shape in each of several samples


class Column(NamedTuple):
    """One part of all samples, in tensors over its files, whose pages all processes share.

    Writing to them would end the process: hand out copies only.

    Attributes:
        values: a row for each sample; or, where shapes differ, all values one after another.
        places: where shapes differ: a row for each sample, its shape and then its first value.
    """

    values: Tensor
    places: Tensor | None

    @classmethod
    def of(cls, path: Path, dtype: torch.dtype, length: int, shape: list[int] | None) -> "Column":
        """Return what is in the files: of this `shape`, or of other shapes in each sample."""
        values = _mapped(path, dtype)
        if shape is not None:
            return cls(values.view(length, *shape), None)
        return cls(values, _mapped(_places_of(path), torch.int64).view(length, -1))

    def rows(self, indices: Tensor) -> Tensor | Ragged:
        """Return the parts of several samples."""
        if self.places is None:
            return rows_of(self.values, indices)
        return Ragged(map(self._cut, rows_of(self.places, indices).tolist()))

    def _cut(self, entry: list[int]) -> Tensor:
        *shape, first = entry
        return self.values[first : first + math.prod(shape)].view(shape).clone()


class ColumnWriter:
    """One part of all samples, written as they come."""

    def __init__(self, path: Path) -> None:
        self._values, self._places = path.open("wb"), _places_of(path).open("wb")
        self._first = 0  # the number of values so far
        self._shapes: set[tuple[int, ...]] = set()

    def close(self) -> None:
        """Close the files."""
        self._values.close()
        self._places.close()

    def add(self, values: bytes, shapes: Shapes) -> None:
        """Write the values of the next samples, which have these shapes."""
        self._shapes.update(map(tuple, shapes))
        places = array("q")
        for shape in shapes:
            places.extend((*shape, self._first))
            self._first += math.prod(shape)
        self._values.write(values)
        places.tofile(self._places)

    def finish(self) -> Sequence[int] | None:
        """Return the shape that all samples have, so that no places are needed; or None."""
        if len(self._shapes) > 1:
            return None
        Path(self._places.name).unlink()
        return self._shapes.pop()


def _places_of(path: Path) -> Path:
    return path.with_suffix(".places.bin")


def _mapped(path: Path, dtype: torch.dtype) -> Tensor:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return torch.empty(0, dtype=dtype, device="cpu")
    with path.open("rb") as file:
        # A private mapping could be written to, but Linux refuses one larger than the memory.
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, that it knows no read-only tensors
        return torch.frombuffer(pages, dtype=dtype)
