"""cache_dataset: decode a data set once, then read whole batches of it from mapped memory."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from pardata.cache._cache_files import (
    MANIFEST,
    Field,
    building,
    create_files,
    locked,
    map_fields,
    publish,
    read_manifest,
)
from pardata.cache._original import (
    Sample,
    check_source,
    class_name,
    default_directory,
    digest,
    identity,
    read_sample,
)
from pardata.cache._sample import fields_of, filled, kinds_of, of_kind, store
from pardata.collective._agreement import Facts, agree, require_same
from pardata.collective._rank_zero import rank_zero_first
from pardata.data._batch import rows_of
from pardata.data._whole_batches import ReadsBatches
from pardata.data._workers import choose_workers
from pardata.output._progress import progress
from pardata.ranks._cores import usable_cores
from pardata.ranks._logger import get_logger
from pardata.ranks._world import World, require_world
from pardata.seeds._generators import kept_generators

_log = get_logger(__name__)

_CHUNK = 64  # samples that a worker decodes at once
_WORTH_WORKERS = 16 * _CHUNK  # samples; with fewer, processes cost more than they bring


def cache_dataset(
    dataset: Dataset[Any],
    directory: str | os.PathLike[str] | None = None,
    *,
    num_workers: int | Literal["auto"] = "auto",
) -> "CachedDataset":
    """Decode `dataset` once into memory-mapped files, and return a data set that reads those.

    `make_loader` reads it by whole batches, some hundred times as fast. All ranks and workers of a
    node share one copy of the pages, and the next run finds the files. They are built with a
    progress bar by several processes, appear all at once when complete, and are built again where
    the source has changed: its length, class or transform, or what 8 of its samples contain.

    Samples are what the data set returns, in dicts, lists and tuples: tensors, arrays and numbers,
    of the same shape and dtype in every sample, and images, which become uint8 tensors of shape
    (bands, height, width). Random transforms would be frozen, and are warned about: leave them to
    the `batch_transform` of `make_loader`.

    Collective in a world larger than one: the first rank of each node builds, the others wait.

    Args:
        dataset: map-style, with ``__getitem__`` and ``__len__``.
        directory: where the files go, one directory for each data set; other files in it are left
            alone. By default a folder below ``$PARDATA_CACHE``, or else in the user's cache
            directory, named after all that tells one data set from another: a changed one gets
            another folder, and the old one stays until you remove it.
        num_workers: processes that decode; ``"auto"`` takes the cores of the node.

    Raises:
        TypeError: for a data set without indices, or a part that cannot be stored; names it.
        ValueError: for an empty data set, and for a sample of other parts, shapes or dtypes than
            the first; names it.
        RuntimeError: for a sample that cannot be read, naming it, and where ranks disagree.
        OSError: where the disk is full or not writable; a cache that was there before stands.
            All on every rank of the node.

    >>> import tempfile, torch
    >>> squares = [(torch.tensor([i, i * i]), i) for i in range(5)]
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     cache_dataset(squares, directory)[3]
    (tensor([3, 9]), 3)
    """
    here = require_world("cache_dataset")
    with kept_generators():
        facts = partial(_facts, dataset, directory, num_workers, here)
        plans = agree(here, "cache_dataset", facts, _plans)
        plan: Any = next(plan for node, plan in plans if node == here.node_rank)
        place, source = Path(plan["place"]), plan["source"]
        with rank_zero_first(local=True):
            first = read_sample(dataset, 0)
            if here.is_local_main:
                _ensure(dataset, place, source, fields_of(first.parts), plan["workers"])
            return CachedDataset(dataset, place, source, first)


class CachedDataset(ReadsBatches):
    """The samples of a data set, read from files; made by `cache_dataset`.

    Attributes:
        source: the data set that was cached, for its ``classes`` and the like; ``None`` in a
            process to which this was sent, a worker that is started by ``"spawn"`` for one.
        directory: where the files are.
    """

    def __init__(
        self, dataset: Dataset[Any], directory: Path, source: dict[str, Any], first: Sample
    ) -> None:
        self.source: Any = dataset
        self.directory = directory
        self._length: int = source["length"]
        self._kinds = kinds_of(first.whole)
        manifest = read_manifest(directory)
        found = {field.path: field for field in manifest["fields"]} if manifest else {}
        expected = {field.path: field for field in fields_of(first.parts)}
        if manifest is None or manifest["source"] != source or found != expected:
            msg = (
                f"the cache in {directory} must be of this data set, but is of another or gone: "
                f"give each data set a directory of its own, and pass the same data set on every "
                f"rank"
            )
            raise RuntimeError(msg)
        self._files: Path = manifest["files"]
        self._stored: list[Field] = manifest["fields"]
        # The keys of a dict may have come in another order when the files were built.
        numbers = {field.path: number for number, field in enumerate(self._stored)}
        self._order = [numbers[path] for path in expected]
        self._map()
        self._sample: Any = first.whole
        self._sample = self[0]  # whose parts do not hang on to the source's memory
        # Of no values, as there are numbers that DataLoader refuses.
        self._batch: Any = default_collate(
            [filled(self._sample, [torch.zeros(())] * len(self._order))]
        )
        # The commonest form of all, which need not be walked through at each batch.
        self._is_flat = type(self._batch) is list and all(
            isinstance(column, Tensor) for column in self._batch
        )

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        stored = zip(self._kinds, self._fields, strict=True)
        return filled(self._sample, (of_kind(kind, field[index].clone()) for kind, field in stored))

    def read_batch(self, indices: Tensor) -> Any:
        """Return the batch that ``default_collate`` would make of the samples at `indices`."""
        columns = [rows_of(field, indices) for field in self._fields]
        return columns if self._is_flat else filled(self._batch, columns)

    def _map(self) -> None:
        try:
            fields = map_fields(self._files, self._stored, self._length)
        except (OSError, ValueError, RuntimeError) as error:  # gone, empty, shorter
            msg = (
                f"the cache in {self.directory} must stay as it was when it was opened, but has "
                f"been removed or built again: call cache_dataset again"
            )
            raise RuntimeError(msg) from error
        self._fields = [fields[number] for number in self._order]

    def __getstate__(self) -> dict[str, Any]:
        # The files are mapped again where it arrives: a copy of them, or of a source that has its
        # data in memory, would defeat the purpose.
        return {
            name: value for name, value in vars(self).items() if name not in ("_fields", "source")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, source=None)
        self._map()


class _Chunks(Dataset[int]):
    """Decodes, as it is indexed, `_CHUNK` samples a time into the files; returns how many."""

    def __init__(self, dataset: Any, directory: Path, fields: list[Field], length: int) -> None:
        self._dataset = dataset
        self._directory = directory
        self._fields = fields
        self._length = length
        self._into: list[Tensor] | None = None  # each process maps the files for itself

    def __len__(self) -> int:
        return len(range(0, self._length, _CHUNK))

    def __getitem__(self, chunk: int) -> int:
        if self._into is None:
            self._into = map_fields(self._directory, self._fields, self._length, writable=True)
        samples = range(self._length)[chunk * _CHUNK : (chunk + 1) * _CHUNK]
        for index in samples:
            parts = read_sample(self._dataset, index).parts
            try:
                store(parts, self._into, index, self._fields)
            except ValueError as error:
                msg = f"sample {index} cannot be stored: {error}"
                raise ValueError(msg) from error
        return len(samples)


def _facts(dataset: Any, directory: Any, num_workers: Any, here: World) -> Facts:
    """Return what the ranks tell each other; the first of a node makes the plan for all of it."""
    check_source(dataset)
    workers = _workers(num_workers, dataset, here)
    plan = None
    if here.is_local_main:
        source = identity(dataset)
        place = default_directory(dataset, source) if directory is None else Path(directory)
        plan = {"source": source, "place": str(place.absolute()), "workers": workers}
    return {
        "the class": class_name(dataset),
        "the length": len(dataset),
        "node": here.node_rank if plan else None,
        "plan": plan,
    }


def _plans(told: list[dict[str, Any]]) -> list[list[Any]]:
    """Require the same data set on all ranks; return the plan of each node."""
    own = [[facts.pop("node"), facts.pop("plan")] for facts in told]
    require_same("cache_dataset", told, "Pass the same data set on every rank.")
    return [each for each in own if each[1] is not None]


def _workers(num_workers: Any, dataset: Any, here: World) -> int:
    node = replace(here, local_size=1)  # the other ranks wait: their cores are free
    if num_workers != "auto":
        return choose_workers(num_workers, dataset, node)
    cores = usable_cores(node)
    return cores if cores > 1 and len(dataset) >= _WORTH_WORKERS else 0


def _ensure(
    dataset: Any, place: Path, source: dict[str, Any], fields: list[Field], workers: int
) -> None:
    """Build the cache unless it is there."""
    if _why_build(place, source) is None:
        return  # without the lock, for which the directory must be writable
    with locked(place):
        why = _why_build(place, source)  # another process may just have built it
        if why is None:
            return
        _log.info("builds the cache in %s, for %s", place, why)
        with building(place) as directory:
            create_files(directory, fields, source["length"])
            written = _written(dataset, directory, fields, source["length"], workers)
            description = f"caching {type(dataset).__name__}"
            for _ in progress(written, description, total=source["length"], batch_size=1):
                pass
            publish(place, digest(source), source, fields)


def _why_build(place: Path, source: dict[str, Any]) -> str | None:
    """Return why there is something to do, or None."""
    manifest = read_manifest(place)
    if manifest is None:
        return "it is damaged" if (place / MANIFEST).exists() else "there is none"
    changed = [name for name in source if manifest["source"].get(name) != source[name]]
    return f"the {' and the '.join(changed)} changed" if changed else None


def _written(
    dataset: Any, directory: Path, fields: list[Field], length: int, workers: int
) -> Iterator[int]:
    """Decode all samples into the files; yield something for each."""
    chunks: DataLoader[int] = DataLoader(
        _Chunks(dataset, directory, fields, length), batch_size=None, num_workers=workers
    )
    try:
        for samples in chunks:
            yield from range(samples)
    except Exception as error:
        if workers == 0:
            raise
        # Its frames, which tell nothing of the sample, would keep the workers alive.
        raise error.with_traceback(None) from error.__cause__
