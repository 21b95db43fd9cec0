"""The files of a cache, one for each field of a sample: mapped, and built all at once or not."""

import json
import mmap
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pardata.cache._original import CHUNK, Fields, read_sample, store
from pardata.data._whole_batches import on_cpu
from pardata.output._progress import progress
from pardata.ranks._logger import get_logger
from pardata.values._arguments import make_folder
from pardata.values._tree import digest_of

_log = get_logger(__name__)

# Nothing else in the directory is touched: it may hold the user's own files too.
_LOCK = "pardata-lock"
_BUILDING = "pardata-building"
_FILES = "pardata-files-"
_SOURCE = "source.json"


class Files(NamedTuple):
    """The files of a cache, one for each field.

    Attributes:
        folder: where they are.
        fields: of a sample, in any order.
        length: number of samples.
    """

    folder: Path
    fields: Fields
    length: int

    def sizes(self) -> dict[str, int]:
        """Return how many bytes each file has, by name, in the order of the fields' paths."""
        fields = sorted(self.fields.items())
        return {f"{n}.bin": self.length * field.nbytes for n, (_, field) in enumerate(fields)}

    def are_there(self) -> bool:
        """Whether they are complete."""
        files = {self.folder / name: size for name, size in self.sizes().items()}
        return all(file.is_file() and file.stat().st_size == n for file, n in files.items())

    def mapped(self, *, writable: bool = False) -> dict[str, Tensor]:
        """Return each field of all samples as a tensor over its file, whose pages all share.

        Writing to a tensor that is not `writable` ends the process: hand out copies only. (A
        private mapping could be written to, but Linux refuses one that is larger than the memory.)
        """
        mode, access = ("r+b", mmap.ACCESS_WRITE) if writable else ("rb", mmap.ACCESS_READ)
        found = {}
        for path, (name, size) in zip(sorted(self.fields), self.sizes().items(), strict=True):
            field = self.fields[path]
            flat = torch.empty(0, dtype=field.dtype, device="cpu")
            if size:  # an empty file cannot be mapped
                with (self.folder / name).open(mode) as file:
                    pages = mmap.mmap(file.fileno(), 0, access=access)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # PyTorch's, that it knows no read-only tensors
                    flat = torch.frombuffer(pages, dtype=field.dtype)
            found[path] = flat.view(self.length, *field.shape)
        return found


def files_of(place: Path, source: dict[str, Any], fields: Fields) -> Files:
    """Return the files of this source in a directory: in a folder named after what they hold."""
    kinds = [[path, str(f.dtype), *f.shape] for path, f in sorted(fields.items())]
    return Files(place / (_FILES + digest_of([source, kinds])), fields, source["length"])


def ensure(dataset: Any, files: Files, source: dict[str, Any], workers: int) -> None:
    """Build the cache of this source unless it is there."""
    place = files.folder.parent
    unfinished = files._replace(folder=place / _BUILDING)
    # Without the lock, for which the directory must be writable, unless there is something to do.
    if files.are_there() and not (unfinished.folder.exists() and os.access(place, os.W_OK)):
        return
    with _locked(place), on_cpu():
        shutil.rmtree(unfinished.folder, ignore_errors=True)  # what a killed process left
        if files.are_there():  # another process may just have built it
            return
        _log.info("building the cache in %s because %s", place, _why_build(files, source))
        try:
            _create(unfinished)
            writer = _Writer(dataset, unfinished)
            chunks = DataLoader(writer, CHUNK, num_workers=workers, collate_fn=len)
            description = f"caching {type(dataset).__name__}"
            for _ in progress(_written(chunks), description, total=files.length, batch_size=1):
                pass
            _publish(unfinished.folder, files.folder, source)
        finally:
            shutil.rmtree(unfinished.folder, ignore_errors=True)  # nothing, once it is published


def _why_build(files: Files, source: dict[str, Any]) -> str:
    """Return why there is something to do."""
    if files.folder.exists():
        return "it is damaged"
    for other in files.folder.parent.glob(f"{_FILES}*/{_SOURCE}"):
        with suppress(OSError, ValueError, TypeError):
            before = json.loads(other.read_text())
            changed = [name for name in source if before[name] != source[name]]
            return f"the {' and the '.join(changed or ['shapes or dtypes'])} changed"
    return "there is none"


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let one process at a time build here; the lock goes with the process that holds it."""
    make_folder(directory)
    with (directory / _LOCK).open("a") as file:
        # Not on Windows, where ranks are still one at a time, and file systems without locks.
        with suppress(ImportError, OSError):
            import fcntl  # noqa: PLC0415  # Windows has none

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _log.info("waiting for another process that builds the cache in %s", directory)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _create(files: Files) -> None:
    """Make the files at their full length, so that a full disk is an error now and no crash later.

    Raises:
        OSError: where they do not fit; says how much they take.
    """
    files.folder.mkdir()
    for name, size in files.sizes().items():
        path = files.folder / name
        with path.open("wb") as file:
            try:
                if size and hasattr(os, "posix_fallocate"):  # not on macOS and Windows
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
            except OSError as error:
                total = sum(files.sizes().values())
                text = f"{error.strerror}, and the cache takes {total:,} bytes"
                raise OSError(error.errno, text, str(path)) from error


def _publish(unfinished: Path, final: Path, source: dict[str, Any]) -> None:
    """Make what was built the cache, in one step, and remove what was there before."""
    # Written before anything of the old cache goes: the disk may be full now.
    (unfinished / _SOURCE).write_text(json.dumps(source, indent=1))
    for path in unfinished.iterdir():
        with path.open("r+b") as file:
            os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)  # of the same source, but damaged
    unfinished.rename(final)
    for older in final.parent.glob(_FILES + "*"):
        if older != final:
            shutil.rmtree(older, ignore_errors=True)  # who reads it has it mapped


class _Writer(Dataset[None]):
    """Decodes a sample into the files when it is asked for it, here or in a worker."""

    def __init__(self, dataset: Any, files: Files) -> None:
        self._dataset, self._files = dataset, files
        self._into: dict[str, Tensor] | None = None  # each process maps the files for itself

    def __len__(self) -> int:
        return self._files.length

    def __getitem__(self, index: int) -> None:
        if self._into is None:
            self._into = self._files.mapped(writable=True)
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
