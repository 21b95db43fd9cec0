"""cache_dataset: decode a dataset once, then read whole batches of it from mapped memory."""

import os
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from pardata._pytree import bytes_of, leaves_with_path, map_with_path
from pardata._validation import check_map_style
from pardata.cache._build import CacheManifest, build_if_missing, manifest_of
from pardata.cache._source import class_name, from_tensors, is_numbers, num_decoders
from pardata.collectives._barrier import rank_zero_first
from pardata.data._batch import Ragged
from pardata.data._batched_read import BatchReadable
from pardata.data._held_objects import held_mixtures, listed_samples
from pardata.environment._world import require_world, store_client
from pardata.rng._rng_state import fork_rng
from pardata.store._round import Facts, compare_facts


def cache_dataset(
    dataset: Dataset[Any],
    directory: str | os.PathLike[str] | None = None,
    *,
    num_workers: int | Literal["auto"] = "auto",
) -> "CachedDataset":
    """Decode `dataset` once into memory-mapped files, and return a dataset that reads these files.

    `make_loader` reads it by whole batches, which is faster (``benchmarks/loading.py``). All ranks
    and workers of a node share one copy of the pages, and the next run finds the files. Several
    processes build them, with a progress bar; all files appear at once when complete. They are
    built again if the dataset has changed: its length, class or transform, or the content of 8
    samples. Attributes with an entry for each sample count too, such as files and labels.

    Samples are what the dataset returns, in dicts, lists and tuples: tensors, arrays, numbers,
    lists of numbers, bytes and images. Images become uint8 tensors of shape (bands, height, width).
    Each part has the same dtype and number of dimensions in every sample. A batch has a tensor of
    each part whose shape is the same too, and a list of any other. A `collate_fn` gets the samples.
    The cache would freeze random transforms, and a warning says so: leave them to the
    `batch_transform` of `make_loader`.

    Files that are missing, or of another size than was written, are built again.

    Collective in a world larger than one: the first rank of each node builds, the others wait.

    Args:
        dataset: map-style, with ``__getitem__`` and ``__len__``.
        directory: where the files go. Several datasets may share it, and other files stay. A build
            removes older versions of its dataset. Such a version has the same class, length and
            ``Subset``. It lists the same, or most of the 8 samples are the same. By default it is a
            folder below ``$PARDATA_CACHE``, or else in the user's cache directory. Its name has a
            hash of all that is compared. That of an older version stays until you remove it.
        num_workers: processes that decode; ``"auto"`` takes the cores of the node.

    Raises:
        TypeError: the dataset has no indices.
        ValueError: the dataset is empty, or a sample, which it names, has other parts, dtypes or
            numbers of dimensions than the first. Or no `directory` is given and there is no home
            directory.
        RuntimeError: a sample, which it names, cannot be read, or a part of it cannot be stored. Or
            ranks disagree.
        OSError: the directory is a file, or the disk is full or not writable. A cache that was
            there before stays. All errors come on every rank of the node.

    >>> import tempfile, torch
    >>> squares = [(torch.tensor([i, i * i]), i) for i in range(5)]
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     cache_dataset(squares, directory)[3]
    (tensor([3, 9]), 3)
    """
    world = require_world("cache_dataset")
    with fork_rng():
        found: list[tuple[CacheManifest, Any, int]] = []

        def look() -> Facts:
            check_map_style(dataset, " to be cached")
            if held_mixtures(dataset):
                raise TypeError(
                    "a Mixture must not be cached, as its order changes: cache its datasets"
                )
            workers = num_decoders(num_workers, dataset, world)
            files, first = manifest_of(dataset, directory)
            found.append((files, first, workers))
            facts = {"the class": class_name(dataset), "the length": files.source["length"]}
            return {**facts, "the listed samples": listed_samples(dataset)}

        compare_facts(store_client(), "cache_dataset", look, "Pass the same dataset on every rank.")
        files, first, workers = found[0]
        # Practically no timeout: a progress bar shows how far the build is.
        with rank_zero_first(local=True, timeout=3e7):
            if world.is_local_main:
                build_if_missing(dataset, files, workers)
            return CachedDataset(dataset, files, first)


class CachedDataset(BatchReadable):
    """The samples of a dataset, read from files; made by `cache_dataset`.

    Attributes:
        source: the dataset that was cached, for attributes as ``classes``. It is ``None`` in a
            process to which this was sent, such as a worker that ``"spawn"`` starts.
        directory: where the files are.
    """

    def __init__(self, dataset: Any, files: CacheManifest, first: Any) -> None:
        self.source, self.directory = dataset, files.folder.parent
        self._files = files
        try:
            self._columns = files.columns()
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:  # gone, damaged
            msg = f"the cache in {self.directory} must be of this dataset, but is of another"
            msg += " version or gone: call cache_dataset again, with the same dataset on every rank"
            raise RuntimeError(msg) from error
        self._sample: Any = first
        self._sample = self[0]  # a copy, which does not keep the source's memory alive
        self._kinds = [leaf for _, leaf in leaves_with_path(self._sample, is_leaf=is_numbers)]
        # Without values, because `default_collate` refuses some numbers.
        nothing = torch.zeros((), device="cpu")
        sample = map_with_path(first, lambda *_: nothing, is_leaf=is_numbers)
        self._batch: Any = default_collate([sample])

    def __len__(self) -> int:
        return int(self._files.source["length"])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Tensor | Sequence[int]) -> list[Any]:
        """Return the samples at `indices`, as ``DataLoader`` asks for them."""
        return [from_tensors(self._sample, row) for row in zip(*self._rows(indices), strict=True)]

    def read_batch(self, indices: Tensor | Sequence[int]) -> Any:
        """Return the batch that ``default_collate`` would make of the samples at `indices`.

        Bytes, and parts whose shapes differ, are lists with an item for each sample.
        """
        columns = map(_collated, self._kinds, self._rows(indices))
        return map_with_path(self._batch, lambda *_: next(columns))

    def _rows(self, indices: Tensor | Sequence[int]) -> list[Tensor | Ragged]:
        chosen = torch.as_tensor(indices, device="cpu")
        return [column.rows(chosen) for column in self._columns]

    def __reduce__(self) -> Any:
        # The receiving process maps the files again. It gets neither a copy of them nor the source.
        return type(self), (None, self._files, self._sample)


def _collated(leaf: Any, rows: Tensor | Ragged) -> Any:
    """Return the column of a batch for the parts of the type of `leaf`."""
    if isinstance(leaf, bytes):
        return Ragged(bytes(bytes_of(row)) for row in rows)
    if isinstance(leaf, list) and isinstance(rows, Tensor):
        return list(rows.t().contiguous())  # a tensor for each place in a list of numbers
    return rows
