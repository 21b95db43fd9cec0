"""The manifest of a cache: names and sizes of its files, and the columns mapped from them.

Does not detect changed bytes, only missing files and wrong sizes.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pardata._pytree import content_hash
from pardata._validation import local_path
from pardata.cache._column import Column
from pardata.cache._source import Fields, default_directory, read_sample, source_signature

# Other names in the directory are left alone: the user may keep files there too.
FILES = "pardata-files-"
SOURCE = "source.json"


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
        paths = self.paths(self.folder)
        return [
            Column.of(paths[path], field.dtype, length, shapes[path])
            for path, field in self.fields.items()
        ]

    def is_valid(self) -> bool:
        """Whether all files exist and have the recorded sizes."""
        with suppress(OSError, ValueError, TypeError, KeyError):  # a damaged file may hold anything
            written = self._facts()["files"]
            return all((self.folder / name).stat().st_size == written[name] for name in written)
        return False

    def _facts(self) -> Any:
        """Return the manifest."""
        return json.loads((self.folder / SOURCE).read_text())


def manifest_of(dataset: Any, directory: Any) -> tuple[CacheManifest, Any]:
    """Return the manifest of a dataset, in a folder named by its hash, and the first sample."""
    source = source_signature(dataset)
    first, parts = read_sample(dataset, 0)
    fields = {path: torch.empty_like(part, device="meta") for path, part in parts.items()}
    kinds = [[path, str(field.dtype), field.ndim] for path, field in sorted(fields.items())]
    place = default_directory(dataset, source) if directory is None else directory
    folder = local_path("directory", place) / (FILES + content_hash([source, kinds]))
    return CacheManifest(folder, fields, source), first
