"""The manifest of a checkpoint: what was written in its folder, and whether it is still that."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pardata.checkpoint._disk import sync

FORMAT = 1
STATE = "state.pt"

_MANIFEST = "manifest.json"


class UnusableError(RuntimeError):
    """A checkpoint is not what was written, and why."""


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> int:
    """Describe all files in a folder, wait until they are on the disk, and return their bytes."""
    written = sorted(folder.rglob("*"))
    digests = {path: _size_and_digest(path) for path in written if path.is_file()}
    files = {path.relative_to(folder).as_posix(): digest for path, digest in digests.items()}
    manifest = {"format": FORMAT, "files": files, **facts}
    signed = {"sha256": _digest(manifest), "manifest": manifest}
    (folder / _MANIFEST).write_text(json.dumps(signed, sort_keys=True, indent=1))
    sync(*written, folder / _MANIFEST, folder)
    return sum(size for size, _ in files.values())


def verified(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, after reading every byte of it.

    Raises:
        UnusableError: where anything is not as it was written; says what.
    """
    try:
        manifest = _read_manifest(folder)
        for file, (size, digest) in manifest["files"].items():
            found = _size_and_digest(_file_in(folder, file))
            if found[0] != size:
                msg = f"{file} has {found[0]:,} bytes and should have {size:,}"
                raise UnusableError(msg)
            if found[1] != digest:
                msg = f"the checksum of {file} is wrong"
                raise UnusableError(msg)
    except OSError as error:
        msg = f"it cannot be read ({error})"
        raise UnusableError(msg) from error
    return manifest


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        signed = json.loads(_file_in(folder, _MANIFEST).read_bytes())
        manifest: dict[str, Any] = signed["manifest"]
        intact = _digest(manifest) == signed["sha256"]
        found = manifest["format"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        msg = f"{_MANIFEST} is damaged"
        raise UnusableError(msg) from error
    if not intact:
        msg = f"the checksum of {_MANIFEST} is wrong"
        raise UnusableError(msg)
    if found != FORMAT:
        msg = f"its format is {found!r}, and this pardata reads {FORMAT}"
        raise UnusableError(msg)
    return manifest


def _file_in(folder: Path, file: str) -> Path:
    """Return the path of a file, and of nothing that is elsewhere, or on which a reader waits."""
    path = folder / file
    if not path.resolve().is_relative_to(folder.resolve()):
        msg = f"{file} is not in it, but in {path.resolve().parent}"
        raise UnusableError(msg)
    if not path.is_file():
        msg = f"{file} is missing"
        raise UnusableError(msg)
    return path


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _size_and_digest(path: Path) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()
