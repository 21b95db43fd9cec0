"""Files that are on the disk as a whole, and the manifest of those that make a checkpoint."""

import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

FORMAT = 1
STATE = "state.pt"

_MANIFEST = "manifest.json"


class UnusableError(RuntimeError):
    """A checkpoint is not what was written, and why."""


# What is recorded of a file: how many bytes, and their SHA-256.
Record: TypeAlias = tuple[int, str]
Manifest: TypeAlias = dict[str, Any]


def write_manifest(folder: Path, facts: Manifest, done: Mapping[str, Record]) -> int:
    """Describe all files in a folder, wait until they are on the disk, and return their bytes.

    Those that are known, because their writers have recorded and synced them, are not read.
    """
    others = [p for p in sorted(folder.rglob("*")) if p.relative_to(folder).as_posix() not in done]
    files = {p.relative_to(folder).as_posix(): record_of(p) for p in others if p.is_file()}
    files.update(done)
    manifest = {"format": FORMAT, "files": files, **facts}
    signed = {"sha256": _digest(manifest), "manifest": manifest}
    (folder / _MANIFEST).write_text(json.dumps(signed, sort_keys=True, indent=1))
    sync(*others, folder / _MANIFEST, folder)
    return sum(size for size, _ in files.values())


def verified(folder: Path, step: int, rank: int = 0, ranks: int = 1) -> Manifest:
    """Return the manifest of the checkpoint of a step, after reading every byte of its files.

    Several ranks share them: all read the manifest, the first the file that all will read, and
    each its part of the others.

    Raises:
        UnusableError: if anything is not as it was written; says what.
    """
    try:
        manifest = read_manifest(folder)
        _require(manifest["step"] == step, f"it is that of step {manifest['step']}")
        files = sorted(manifest["files"].items(), key=lambda file: file[0] != STATE)
        for file, (size, digest) in files[rank::ranks]:
            _require((folder / file).is_file(), f"{file} is missing")
            length, found = record_of(folder / file)
            _require(length == size, f"{file} has {length:,} bytes and should have {size:,}")
            _require(found == digest, f"the checksum of {file} is wrong")
    except OSError as error:
        raise UnusableError(f"it cannot be read ({error})") from error
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Return what was written about a checkpoint, or raise an `UnusableError`."""
    path = folder / _MANIFEST
    _require(path.is_file(), f"{_MANIFEST} is missing")
    try:
        signed = json.loads(path.read_bytes())
        manifest: Manifest = signed["manifest"]
        intact = _digest(manifest) == signed["sha256"]
        found = manifest["format"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UnusableError(f"{_MANIFEST} is damaged") from error
    _require(intact, f"the checksum of {_MANIFEST} is wrong")
    _require(found == FORMAT, f"its format is {found!r}, and this pardata reads {FORMAT}")
    return manifest


def _require(condition: object, why: str) -> None:
    """Raise if a condition does not hold, without which a checkpoint is of no use."""
    if not condition:
        raise UnusableError(why)


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def record_of(path: Path) -> Record:
    """Return what a manifest records of a file, after reading it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


class _HashedWriter(io.BufferedWriter):
    """A file, and the SHA-256 of what is written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.open("wb", buffering=0))
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return super().write(data)


def save(thing: Any, path: Path) -> Record:
    """Write as ``torch.save`` does, wait until it is on the disk, and return the file's record.

    Raises:
        OSError: if the disk is full. PyTorch raises a `RuntimeError` about positions in the file.
    """
    with _HashedWriter(path) as file:
        try:
            torch.save(thing, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), file.sha256.hexdigest()


def sync(*paths: Path) -> None:
    """Wait until files, and the names in directories, are on the disk."""
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
