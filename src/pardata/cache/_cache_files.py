"""The files of a cache: what they are called, whether they are complete, and mapped."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pardata._pytree import content_hash
from pardata.cache._column import Column
from pardata.cache._original import Fields

# Nothing else in the directory is touched: it may hold the user's own files too.
FILES = "pardata-files-"
SOURCE = "source.json"


class Files(NamedTuple):
    """The files of a cache.

    Attributes:
        folder: where they are.
        fields: the parts of a sample, in any order.
        length: number of samples.
    """

    folder: Path
    fields: Fields
    length: int

    def paths(self, folder: Path) -> dict[str, Path]:
        """Return the file in a folder that has the values of each part."""
        return {path: folder / f"{n}.bin" for n, path in enumerate(sorted(self.fields))}

    def columns(self) -> list[Column]:
        """Return each part of all samples, in the order of the fields."""
        shapes = self.facts()["shapes"]
        paths = self.paths(self.folder)
        return [
            Column.of(paths[path], field.dtype, self.length, shapes[path])
            for path, field in self.fields.items()
        ]

    def facts(self) -> dict[str, Any]:
        """Return what was written about them."""
        facts: dict[str, Any] = json.loads((self.folder / SOURCE).read_text())
        return facts

    def are_there(self) -> bool:
        """Whether they are complete: each has as many bytes as were written."""
        # A damaged file may hold anything.
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError):
            self.columns()
            written = self.facts()["files"]
            return all((self.folder / name).stat().st_size == written[name] for name in written)
        return False


def files_of(directory: Path, source: dict[str, Any], fields: Fields) -> Files:
    """Return the files of this source in a directory: in a folder named after what they hold."""
    kinds = [[path, str(field.dtype), field.ndim] for path, field in sorted(fields.items())]
    return Files(directory / (FILES + content_hash([source, kinds])), fields, source["length"])
