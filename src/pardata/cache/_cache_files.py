"""The files of a cache, one for each field of a sample: mapped, and built all at once or not."""

import json
import mmap
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pardata.cache._original import CHUNK, digest, read_sample
from pardata.cache._sample import Field, name_of, store
from pardata.output._progress import progress
from pardata.ranks._logger import get_logger

_log = get_logger(__name__)

# Nothing else in the directory is touched: it may hold the user's own files too.
_MANIFEST = "pardata-cache.json"
_LOCK = "pardata-lock"
_BUILDING = "pardata-building"
_FILES = "pardata-files-"


def map_fields(
    directory: Path, fields: list[Field], length: int, *, writable: bool = False
) -> dict[str, Tensor]:
    """Return each field of all samples as a tensor over its file; all processes share the pages.

    Writing to a tensor that is not `writable` ends the process: hand out copies only. (A private
    mapping could be written to, but Linux refuses one that is larger than the memory.)
    """
    mode, access = ("r+b", mmap.ACCESS_WRITE) if writable else ("rb", mmap.ACCESS_READ)
    found = {}
    for number, field in enumerate(fields):
        flat = torch.empty(0, dtype=field.dtype)
        if field.size_in_bytes(length):  # an empty file cannot be mapped
            with (directory / f"{number}.bin").open(mode) as file:
                pages = mmap.mmap(file.fileno(), 0, access=access)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch's, that it knows no read-only tensors
                flat = torch.frombuffer(pages, dtype=field.dtype)
        found[field.path] = flat.view(length, *field.shape)
    return found


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of a cache that is complete, or None."""
    try:
        manifest: dict[str, Any] = json.loads((directory / _MANIFEST).read_text())
        stored = [(f["path"], getattr(torch, f["dtype"]), f["shape"]) for f in manifest["fields"]]
        fields = [Field(path, dtype, tuple(shape)) for path, dtype, shape in stored]
        files, length = directory / manifest["files"], manifest["source"]["length"]
        if files.parent != directory or not files.name.startswith(_FILES):
            return None  # nothing outside of the directory is read, whatever the manifest says
        for number, field in enumerate(fields):
            if (files / f"{number}.bin").stat().st_size != field.size_in_bytes(length):
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the last: no such dtype
        return None
    return {**manifest, "fields": fields, "files": files}


def ensure(
    dataset: Any, place: Path, source: dict[str, Any], fields: list[Field], workers: int
) -> None:
    """Build the cache of this source unless it is there."""
    if _why_build(place, source) is None:
        return  # without the lock, for which the directory must be writable
    with _locked(place):
        why = _why_build(place, source)  # another process may just have built it
        if why is None:
            return
        _log.info("builds the cache in %s, for %s", place, why)
        unfinished, length = place / _BUILDING, source["length"]
        shutil.rmtree(unfinished, ignore_errors=True)  # what a killed process left
        try:
            _create_files(unfinished, fields, length)
            writer = _Writer(dataset, unfinished, fields, length)
            chunks = DataLoader(writer, CHUNK, num_workers=workers, collate_fn=len)
            description = f"caching {type(dataset).__name__}"
            for _ in progress(_written(chunks), description, total=length, batch_size=1):
                pass
            _publish(place, source, fields)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)  # nothing, once it is published


def _why_build(place: Path, source: dict[str, Any]) -> str | None:
    """Return why there is something to do, or None."""
    manifest = read_manifest(place)
    if manifest is None:
        return "it is damaged" if (place / _MANIFEST).exists() else "there is none"
    changed = [name for name in source if manifest["source"].get(name) != source[name]]
    return f"the {' and the '.join(changed)} changed" if changed else None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let one process at a time build here; the lock goes with the process that holds it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / _LOCK).open("a") as file:
        # Not on Windows, where ranks are still one at a time, and file systems without locks.
        with suppress(ImportError, OSError):
            import fcntl  # noqa: PLC0415  # Windows has none

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("waits for the process that builds the cache in %s", directory)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _create_files(directory: Path, fields: list[Field], length: int) -> None:
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
                raise OSError(
                    error.errno, f"{error.strerror}, and the cache takes {total:,} bytes", str(path)
                ) from error


def _publish(directory: Path, source: dict[str, Any], fields: list[Field]) -> None:
    """Make what was built the cache, in one step, and remove what was there before."""
    unfinished, final = directory / _BUILDING, directory / (_FILES + digest(source))
    stored = [{**field._asdict(), "dtype": name_of(field.dtype)} for field in fields]
    manifest = {"source": source, "fields": stored, "files": final.name}
    # Written before anything of the old cache goes: the disk may be full now.
    (unfinished / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in unfinished.iterdir():
        with path.open("r+b") as file:
            os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)  # of the same source, but damaged
    unfinished.rename(final)
    (final / _MANIFEST).replace(directory / _MANIFEST)
    for older in directory.glob(_FILES + "*"):
        if older != final:
            shutil.rmtree(older, ignore_errors=True)  # who reads it has it mapped


class _Writer(Dataset[None]):
    """Decodes a sample into the files when it is asked for it, here or in a worker."""

    def __init__(self, dataset: Any, directory: Path, fields: list[Field], length: int) -> None:
        self._dataset = dataset
        self._files = directory, fields, length
        self._into: dict[str, Tensor] | None = None  # each process maps the files for itself

    def __len__(self) -> int:
        return self._files[-1]

    def __getitem__(self, index: int) -> None:
        if self._into is None:
            self._into = map_fields(*self._files, writable=True)
        _, parts = read_sample(self._dataset, index)
        store(parts, self._into, index)


def _written(chunks: DataLoader[None]) -> Iterator[int]:
    """Decode all samples into the files; yield something for each."""
    try:
        for samples in chunks:
            yield from range(samples)
    except Exception as error:
        if chunks.num_workers == 0:
            raise
        # Its frames, which tell nothing of the sample, would keep the workers alive.
        raise error.with_traceback(None) from error.__cause__
