"""Files that are on the disk as a whole, and the manifest of those that make a checkpoint."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from pardata.collectives._all_gather import gather_to_rank_zero
from pardata.environment._world import World

FORMAT = 1
STATE = "state.pt"
OWN = "rank-{:05d}.pt"  # what a rank has of its own

_MANIFEST = "manifest.json"


class UnusableError(RuntimeError):
    """A checkpoint is not what was written, and why."""


# What is recorded of files: how many bytes, and their SHA-256.
Digests: TypeAlias = Mapping[str, tuple[int, str]]
# Waits until the parts of all ranks are written, and returns what is recorded of them.
Written: TypeAlias = Callable[[], Digests]
Manifest: TypeAlias = dict[str, Any]


def write_manifest(folder: Path, facts: Manifest, known: Digests) -> int:
    """Describe all files in a folder, wait until they are on the disk, and return their bytes.

    Those of which others know the digests, having written them and synced them, are not read.
    """
    unread = [p for p in sorted(folder.rglob("*")) if p.relative_to(folder).as_posix() not in known]
    files = {p.relative_to(folder).as_posix(): size_and_digest(p) for p in unread if p.is_file()}
    files.update(known)
    manifest = {"format": FORMAT, "files": files, **facts}
    signed = {"sha256": _digest(manifest), "manifest": manifest}
    (folder / _MANIFEST).write_text(json.dumps(signed, sort_keys=True, indent=1))
    sync(*unread, folder / _MANIFEST, folder)
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
            length, found = size_and_digest(folder / file)
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


def size_and_digest(path: Path) -> tuple[int, str]:
    """Return what a manifest records of a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def save(thing: Any, path: Path) -> None:
    """Write as ``torch.save`` does, and raise an `OSError` if the disk is full.

    PyTorch raises a `RuntimeError` then, about positions in the file.
    """
    with path.open("wb") as file:
        try:
            torch.save(thing, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def write_own(here: World, folder: Path, own: Any, group: Any) -> Digests:
    """Write what this rank has of its own; return the records of all on rank 0. Collective.

    Raises:
        OSError: on rank 0, if any rank failed.
    """
    path = folder / OWN.format(here.rank)
    record, why = (0, ""), ""
    try:
        save(own, path)
        sync(path)
        record = size_and_digest(path)
    except Exception as error:  # noqa: BLE001  # whatever it is, rank 0 waits for this one
        why = f"rank {here.rank}: {error!r}"
    reports = gather_to_rank_zero(here, (path.name, record, why), group)
    if failed := "; ".join(why for *_, why in reports if why):
        raise OSError(f"every rank must write what it has of its own, but not all could: {failed}")
    return {name: record for name, record, _ in reports}


def sync(*paths: Path) -> None:
    """Wait until files, and the names in directories, are on the disk."""
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
