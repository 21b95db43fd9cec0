"""The files of a cache: one for each field of a sample, memory-mapped, and a manifest."""

import json
import math
import mmap
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pardata.ranks._logger import get_logger

_log = get_logger(__name__)

# Nothing else in the directory is touched: it may hold the user's own files too.
MANIFEST = "pardata-cache.json"
_LOCK = "pardata-lock"
_BUILDING = "pardata-building"
_FILES = "pardata-files-"


@dataclass(frozen=True)
class Field:
    """One part of every sample: where it stands in the sample, and its dtype and shape."""

    path: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def size_in_bytes(self, length: int) -> int:
        """Return how long the file of `length` samples is."""
        return length * self.numel * self.torch_dtype.itemsize


def map_fields(
    directory: Path, fields: list[Field], length: int, *, writable: bool = False
) -> list[Tensor]:
    """Return each field of all samples as a tensor over its file; all processes share the pages.

    Writing to a tensor that is not `writable` ends the process: hand out copies only. (A private
    mapping could be written to, but Linux refuses one that is larger than the memory.)
    """
    return [
        _mapped(directory / f"{number}.bin", field, length, writable=writable)
        for number, field in enumerate(fields)
    ]


def _mapped(path: Path, field: Field, length: int, *, writable: bool) -> Tensor:
    if not length * field.numel:  # an empty file cannot be mapped
        return torch.empty(length, *field.shape, dtype=field.torch_dtype)
    with path.open("r+b" if writable else "rb") as file:
        pages = mmap.mmap(
            file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, that it knows no tensors for reading only
        flat = torch.frombuffer(pages, dtype=field.torch_dtype)
    return flat.view(length, *field.shape)


def create_files(directory: Path, fields: list[Field], length: int) -> None:
    """Make the files at their full length, so that a full disk is an error now and no crash later.

    Raises:
        OSError: where they do not fit; says how much they take.
    """
    directory.mkdir()
    for number, field in enumerate(fields):
        path, size = directory / f"{number}.bin", field.size_in_bytes(length)
        with path.open("wb") as file:
            try:
                if size and hasattr(os, "posix_fallocate"):  # not on macOS and Windows
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
            except OSError as error:
                total = sum(each.size_in_bytes(length) for each in fields)
                msg = f"{error.strerror}, and the cache takes {total:,} bytes"
                raise OSError(error.errno, msg, str(path)) from error


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of a cache that is complete, or None."""
    try:
        manifest: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
        fields = [Field(f["path"], f["dtype"], tuple(f["shape"])) for f in manifest["fields"]]
        files, length = directory / manifest["files"], manifest["source"]["length"]
        if files.parent != directory or not files.name.startswith(_FILES):
            return None  # nothing outside of the directory is read, whatever the manifest says
        for number, field in enumerate(fields):
            if (files / f"{number}.bin").stat().st_size != field.size_in_bytes(length):
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the last: no such dtype
        return None
    return {**manifest, "fields": fields, "files": files}


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Let one process at a time build here; the lock goes with the process that holds it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / _LOCK).open("a") as file:
        try:
            import fcntl  # noqa: PLC0415  # not on Windows, where ranks are still one at a time
        except ImportError:
            yield
            return
        with suppress(OSError):  # a file system without locks: as on Windows
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("waits for the process that builds the cache in %s", directory)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def building(directory: Path) -> Iterator[Path]:
    """Give a directory to build in, free of what a killed process left; gone where that fails."""
    unfinished = directory / _BUILDING
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def publish(directory: Path, name: str, source: dict[str, Any], fields: list[Field]) -> None:
    """Make what was built the cache, in one step, and remove what was there before."""
    unfinished, final = directory / _BUILDING, directory / (_FILES + name)
    for file in unfinished.iterdir():
        with file.open("r+b") as written:
            os.fsync(written.fileno())
    manifest = {
        "source": source,
        "fields": [asdict(field) for field in fields],
        "files": final.name,
    }
    # Written before anything of the old cache goes: the disk may be full now.
    with (unfinished / MANIFEST).open("w") as draft:
        json.dump(manifest, draft, indent=1)
        draft.flush()
        os.fsync(draft.fileno())
    shutil.rmtree(final, ignore_errors=True)  # of the same source, but damaged
    unfinished.rename(final)
    (final / MANIFEST).replace(directory / MANIFEST)
    for older in directory.glob(_FILES + "*"):
        if older != final:
            shutil.rmtree(older, ignore_errors=True)  # who reads it has it mapped
