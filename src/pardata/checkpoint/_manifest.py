"""The manifest of a checkpoint: what was written in its folder, and whether it is still that."""

import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pardata.model._weight_file import sync

FORMAT = 1

_MANIFEST = "manifest.json"


class UnusableError(RuntimeError):
    """A checkpoint is not what was written, and why."""


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> int:
    """Describe all files in a folder, wait until they are on the disk, and return their bytes."""
    written = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): _size_and_digest(path) for path in written}
    manifest = {"format": FORMAT, "files": files, **facts}
    text = json.dumps(manifest, sort_keys=True)
    signed = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": manifest}
    (folder / _MANIFEST).write_text(json.dumps(signed, sort_keys=True, indent=1))
    folders = [path for path in folder.rglob("*") if path.is_dir()]
    for path in (*written, folder / _MANIFEST, *folders, folder):
        sync(path)
    return sum(size for size, _ in files.values())


def verified(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, after reading every byte of it.

    Raises:
        UnusableError: where anything is not as it was written; says what.
    """
    try:
        _check_plain(folder, _MANIFEST)
        manifest = _read_manifest(folder)
        for file, (size, digest) in manifest["files"].items():
            _check_file(folder, file, size, digest)
    except FileNotFoundError as error:
        msg = f"{Path(str(error.filename)).name} is missing"
        raise UnusableError(msg) from error
    except OSError as error:
        msg = f"it cannot be read ({error})"
        raise UnusableError(msg) from error
    return manifest


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        signed = json.loads((folder / _MANIFEST).read_bytes())
        manifest: dict[str, Any] = signed["manifest"]
        text = json.dumps(manifest, sort_keys=True)
        intact = hashlib.sha256(text.encode()).hexdigest() == signed["sha256"]
        found = manifest.get("format")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        msg = f"{_MANIFEST} is damaged"
        raise UnusableError(msg) from error
    if not intact:
        msg = f"the checksum of {_MANIFEST} is wrong"
        raise UnusableError(msg)
    if found != FORMAT:
        msg = f"its format is {found!r}, and this pardata reads {FORMAT}"
        raise UnusableError(msg)
    if not _says_all(manifest):
        msg = f"{_MANIFEST} does not say what it should"
        raise UnusableError(msg)
    return manifest


def _says_all(manifest: dict[str, Any]) -> bool:
    """Whether all is there, and of the right type, that whoever reads the manifest relies on."""
    files, identity, values = (manifest.get(name) for name in ("files", "identity", "values"))
    return (
        type(manifest.get("step")) is int
        and isinstance(files, dict)
        and all(isinstance(f, list) and list(map(type, f)) == [int, str] for f in files.values())
        and isinstance(values, list)
        and all(isinstance(name, str) for name in values)
        and isinstance(identity, dict)
        and {"processes", "torch", "strategies"} <= set(identity)
        and isinstance(identity["strategies"], dict)
    )


def _check_file(folder: Path, file: str, size: int, digest: str) -> None:
    within = PurePosixPath(file)
    if not within.parts or within.is_absolute() or ".." in within.parts or "\0" in file:
        msg = f"{file!r} is no name of a file in it"
        raise UnusableError(msg)
    _check_plain(folder, file)
    path = folder / file
    found = path.stat().st_size
    if found != size:
        msg = f"{file} has {found:,} bytes and should have {size:,}"
        raise UnusableError(msg)
    if _size_and_digest(path)[1] != digest:
        msg = f"the checksum of {file} is wrong"
        raise UnusableError(msg)


def _check_plain(folder: Path, file: str) -> None:
    """Refuse a link, which may lead elsewhere, and a pipe, on which a reader would wait."""
    within = PurePosixPath(file)
    for part in (PurePosixPath(), *reversed(within.parents), within):
        if (folder / part).is_symlink():
            what = "it" if part == PurePosixPath() else part
            msg = f"{what} is a link, which may lead out of the directory"
            raise UnusableError(msg)
    if not stat.S_ISREG((folder / file).stat().st_mode):
        msg = f"{file} is no file"
        raise UnusableError(msg)


def _size_and_digest(path: Path) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()
