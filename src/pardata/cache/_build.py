"""The files of a cache: several processes decode, one writes, a rename publishes all at once.

Does not protect two nodes from building the same cache at once: the first rename stays. Does not
detect changed bytes in a built cache, only missing files and wrong sizes.

A column is one part of all samples in a file, and a second file of shapes if they differ.
"""

import json
import math
import mmap
import os
import shutil
import warnings
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from socket import gethostname
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from pardata._pytree import bytes_of, content_hash
from pardata._validation import local_path
from pardata.cache._source import CHUNK, Fields, check_structure, read_sample, source_signature
from pardata.data._batch import Ragged
from pardata.data._batched_read import cpu_default_device, take_rows
from pardata.environment._logger import get_logger
from pardata.output._progress import progress

_log = get_logger(__name__)

# Other names in the directory are left alone: the user may keep files there too.
_FILES = "pardata-files-"
_SOURCE = "source.json"
_LOCK = "pardata-lock"
_BUILDING = "pardata-building"
_CHUNK_BYTES = 2**24  # the size of the chunk that a worker decodes at once

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


def _offsets_path(path: Path) -> Path:
    return path.with_suffix(".places.bin")


def _map_file(path: Path, dtype: torch.dtype) -> Tensor:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return torch.empty(0, dtype=dtype, device="cpu")
    with path.open("rb") as file:
        # A private mapping would be writable, but Linux refuses one larger than the memory.
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with warnings.catch_warnings(action="ignore"):  # PyTorch has no read-only tensors, and warns
        return torch.frombuffer(pages, dtype=dtype)


class CacheManifest(NamedTuple):
    """The files of a cache.

    Attributes:
        folder: the directory of the files.
        fields: an empty tensor for each part of a sample, by path.
        source: the signature of the dataset, with its length.
    """

    folder: Path
    fields: Fields
    source: dict[str, Any]

    def paths(self, folder: Path) -> dict[str, Path]:
        """Return the file of each part in `folder`."""
        return {path: folder / f"{n}.bin" for n, path in enumerate(sorted(self.fields))}

    def columns(self) -> list[Column]:
        """Return the column of each part, in the order of `fields`."""
        shapes, length = self._facts()["shapes"], self.source["length"]
        files, fields = self.paths(self.folder), self.fields.items()
        return [Column.of(files[at], field.dtype, length, shapes[at]) for at, field in fields]

    def is_valid(self) -> bool:
        """Whether all files exist and have the recorded sizes."""
        with suppress(OSError, ValueError, TypeError, KeyError):  # a damaged file may hold anything
            written = self._facts()["files"]
            return all((self.folder / name).stat().st_size == written[name] for name in written)
        return False

    def _facts(self) -> Any:
        """Return the manifest."""
        return json.loads((self.folder / _SOURCE).read_text())


def manifest_of(dataset: Any, directory: Any) -> tuple[CacheManifest, Any]:
    """Return the manifest of a dataset, in a folder named by its hash, and the first sample."""
    source = source_signature(dataset)
    first, parts = read_sample(dataset, 0)
    fields = {path: torch.empty_like(part, device="meta") for path, part in parts.items()}
    kinds = [[path, str(field.dtype), field.ndim] for path, field in sorted(fields.items())]
    place = _default_directory(dataset, source) if directory is None else directory
    folder = local_path("directory", place) / (_FILES + content_hash([source, kinds]))
    return CacheManifest(folder, fields, source), first


def _default_directory(dataset: Any, source: dict[str, Any]) -> Path:
    """Return the default directory of the cache of this source."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "pardata")
    place = os.path.expanduser(os.environ.get("PARDATA_CACHE") or users)  # noqa: PTH111  # "~" stays without a home directory
    return Path(place, f"{type(dataset).__name__}-{content_hash(source)}")


def build_if_missing(dataset: Any, files: CacheManifest, workers: int) -> None:
    """Build the cache of this source unless it exists."""
    # Before the lock, which needs a writable directory.
    if files.is_valid():
        return
    directory, prefix = files.folder.parent, f"{_BUILDING}-{gethostname()}-"
    _log.info("pardata builds the cache in %s, or waits for the process that does", directory)
    with _locked(directory) as has_lock, cpu_default_device():
        if files.is_valid():  # another process may just have built it
            return
        # Left by processes that were killed.
        for stale in directory.glob(f"{prefix}*") if has_lock else ():
            shutil.rmtree(stale, ignore_errors=True)
        # A folder of this process: without locks another process may build in this directory at the
        # same time.
        unfinished = directory / f"{prefix}{os.urandom(4).hex()}"
        try:
            unfinished.mkdir()
            _publish(unfinished, files, _write(dataset, files, unfinished, workers))
        except OSError as error:  # the error of a full disk lacks the name
            raise OSError(error.errno, error.strerror, error.filename or str(unfinished)) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)  # nothing is left of it after the rename


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Let one process of this host at a time build in `directory`; yield whether it has the lock.

    The operating system releases the lock if the process dies.
    """
    directory.resolve().mkdir(parents=True, exist_ok=True)  # the target of a link
    has_lock = False
    with (directory / _LOCK).open("a") as file:
        # Windows and some file systems have no locks. `rank_zero_first` still lets one rank of a
        # node build.
        with suppress(ImportError, OSError):
            import fcntl  # noqa: PLC0415  # Windows has none

            fcntl.flock(file, fcntl.LOCK_EX)
            has_lock = True
        yield has_lock


def _encode_chunk(dataset: Any, fields: Fields, indices: list[int]) -> list[tuple[bytes, Shapes]]:
    """Return the bytes and the shapes of each part of several samples, in the order of paths.

    Tensors would take shared memory, which may be small in a container.
    """
    samples = [read_sample(dataset, index)[1] for index in indices]
    for index, parts in zip(indices, samples, strict=True):
        check_structure(parts, fields, index)
    columns = [[sample[path] for sample in samples] for path in sorted(fields)]
    return [(b"".join(map(bytes_of, parts)), [part.shape for part in parts]) for parts in columns]


def _write(dataset: Any, files: CacheManifest, folder: Path, workers: int) -> dict[str, Any]:
    """Write the parts of all samples; return the shape of each part, None if samples differ."""
    size = sum(field.nbytes for field in files.fields.values())
    chunk = min(CHUNK, max(1, _CHUNK_BYTES // max(1, size)))
    indices: Any = range(len(dataset))
    encode, paths = partial(_encode_chunk, dataset, files.fields), files.paths(folder)
    chunks = DataLoader(indices, chunk, num_workers=workers, collate_fn=encode)
    with ExitStack() as stack:
        columns = [(stack.enter_context(file.open("wb")), array("q")) for file in paths.values()]
        try:
            for packed in progress(chunks, f"caching {type(dataset).__name__}", batch_size=chunk):
                for (file, sizes), (values, shapes) in zip(columns, packed, strict=True):
                    file.write(values)
                    sizes.extend(chain.from_iterable(shapes))
        except Exception as error:
            if not workers:
                raise
            # The frames of the traceback would keep the workers alive.
            raise error.with_traceback(None) from error.__cause__
    written = zip(paths.items(), columns, strict=True)
    return {path: _common_shape(file, sizes, len(indices)) for (path, file), (_, sizes) in written}


def _common_shape(path: Path, sizes: Sequence[int], length: int) -> list[int] | None:
    """Return the shape of all samples; if they differ, write their offsets, and return None."""
    shapes = torch.tensor(sizes, dtype=torch.int64).view(length, len(sizes) // length)
    if (shapes == shapes[0]).all():
        return shapes[0].tolist()
    counts = shapes.prod(1)
    first = counts.cumsum(0) - counts
    _offsets_path(path).write_bytes(bytes_of(torch.column_stack([shapes, first])))
    return None


def _publish(unfinished: Path, files: CacheManifest, shapes: dict[str, Any]) -> None:
    """Rename the finished folder, so that it becomes the cache, and remove older versions of it.

    If another process has published a valid cache first, that stays.
    """
    final = files.folder
    # Before the old cache is removed, because the disk may be full now.
    sizes = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
    facts = {**files.source, "shapes": shapes, "files": sizes}
    (unfinished / _SOURCE).write_text(json.dumps(facts, indent=1))
    for path in unfinished.iterdir():
        with path.open("r+b") as file:
            os.fsync(file.fileno())
    try:
        unfinished.rename(final)
    except OSError:
        if files.is_valid():
            return
        shutil.rmtree(final, ignore_errors=True)  # a damaged cache of the same source
        unfinished.rename(final)
    for other in final.parent.glob(f"{_FILES}*/{_SOURCE}"):
        with suppress(OSError, ValueError, TypeError, KeyError):  # a damaged file may hold anything
            if other.parent != final and _is_older(json.loads(other.read_text()), facts):
                shutil.rmtree(other.parent, ignore_errors=True)  # its readers keep their mappings


def _is_older(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether a signature is that of the same dataset before it was changed, not of another one."""
    same = [was == now for was, now in zip(old["contents"], new["contents"], strict=False)]
    is_alike = all(old[fact] == new[fact] for fact in ("length", "class", "indices"))
    return is_alike and (old["listed"] == new["listed"] != "" or sum(same) > len(same) / 2)
