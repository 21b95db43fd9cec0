"""The manifest of a checkpoint: sizes and SHA-256 of its files, written, synced and verified.

Does not decide which checkpoint is the newest: see `_directory`.
"""

import errno
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any, TypeAlias

import torch

from pardata.environment._logger import get_logger

FORMAT = 1
STATE = "state.pt"

_log = get_logger(__name__)

_MANIFEST = "manifest.json"
_UNSYNCED = "this disk cannot sync folders (%s): a power cut may lose the last checkpoint"


class UnusableError(RuntimeError):
    """A checkpoint differs from its manifest; the text says where."""


# The record of a file: its size in bytes, and their SHA-256.
Record: TypeAlias = tuple[int, str]
Manifest: TypeAlias = dict[str, Any]


def write_manifest(folder: Path, facts: Manifest, done: dict[str, Record]) -> int:
    """Write the manifest of a folder, sync all files to the disk, and return their size in bytes.

    The files in `done` are not read again: their writers have recorded and synced them.
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
    """Return the manifest of the checkpoint of a step, after verifying every byte of its files.

    Every rank reads the manifest. Rank 0 verifies the common file, and each rank a part of the
    other files.

    Raises:
        UnusableError: a file is missing or differs from the manifest.
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
    """Return the manifest of a checkpoint, or raise an `UnusableError`."""
    path = folder / _MANIFEST
    _require(path.is_file(), f"{_MANIFEST} is missing")
    try:
        signed = json.loads(path.read_bytes())
        manifest: Manifest = signed["manifest"]
        found = manifest["format"]
        _require(_digest(manifest) == signed["sha256"], f"the checksum of {_MANIFEST} is wrong")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UnusableError(f"{_MANIFEST} is damaged") from error
    _require(found == FORMAT, f"its format is {found!r}, and this pardata reads {FORMAT}")
    return manifest


def _require(condition: object, why: str) -> None:
    """Raise an `UnusableError` unless `condition` holds."""
    if not condition:
        raise UnusableError(why)


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def record_of(path: Path) -> Record:
    """Return the record of a file, after reading it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


class _HashedWriter(io.BufferedWriter):
    """A file that hashes all bytes written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.open("wb", buffering=0))
        self.sha256 = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return super().write(data)


def save(thing: Any, path: Path) -> Record:
    """Write by ``torch.save``, sync the file to the disk, and return its record.

    Raises:
        OSError: the disk is full, for which PyTorch raises a `RuntimeError` about positions in the
            file.
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
    """Sync files, and the entries of directories, to the disk."""
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
                raise
            # SMB and some FUSE file systems cannot do it.
            _log.warning(_UNSYNCED, error, once=True)
        finally:
            os.close(opened)
