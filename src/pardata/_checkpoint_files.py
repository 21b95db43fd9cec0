"""The checkpoints of a run, in one directory: each is complete or not there, and the newest known.

A checkpoint is written below a name of its own, synced to the disk, and renamed; so whatever is
killed when, what has a checkpoint's name is whole. Its name begins with the number of an attempt at
the run. A writer claims the next number by a file that must not exist yet, and looks for a higher
one before it adds or removes anything. So of two writers the older stops, and what it had still to
add is neither newer than what the other one wrote nor in its place.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pardata._weight_files import sync

FORMAT = 1

_MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished-"
_REMOVED = ".removed-"


@dataclass(frozen=True, order=True)
class Name:
    """The name of a checkpoint; the newest is the largest."""

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"attempt-{self.attempt:04d}-step-{self.step:09d}"

    @classmethod
    def parse(cls, text: str) -> "Name | None":
        """Return the name that was written as `text`, if one was."""
        match = re.fullmatch(r"attempt-(\d{4,})-step-(\d{9,})", text, re.ASCII)
        return match and cls(int(match[1]), int(match[2]))


class UnusableError(Exception):
    """A checkpoint is not what was written, and why."""


def names(directory: Path) -> list[Name]:
    """Return the names of all checkpoints, from the oldest to the newest."""
    try:
        found = [Name.parse(entry.name) for entry in directory.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(name for name in found if name is not None)


class Attempt:
    """A right to write in a directory, until somebody claims the next one.

    Raises:
        OSError: where nothing can be written there.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.number = self._claim()
        for older, path in _claims(directory):
            if older < self.number:
                path.unlink(missing_ok=True)
        self._remove_leftovers()

    def begin(self, name: Name) -> Path:
        """Return a new directory to write a checkpoint in, for `commit` or `abandon`."""
        self.check()
        unfinished = self.unfinished(name)
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        return unfinished

    def abandon(self, name: Name) -> None:
        """Remove what was written since `begin`, if it is not a checkpoint by now."""
        shutil.rmtree(self.unfinished(name), ignore_errors=True)

    def commit(self, name: Name, facts: Mapping[str, Any]) -> int:
        """Make what was written since `begin` a checkpoint, in one step; return its bytes."""
        unfinished = self.unfinished(name)
        written = [path for path in sorted(unfinished.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(unfinished)): _size_and_digest(path) for path in written}
        manifest = {"format": FORMAT, "step": name.step, "files": files, **facts}
        text = json.dumps(manifest, sort_keys=True)
        signed = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": manifest}
        (unfinished / _MANIFEST).write_text(json.dumps(signed, sort_keys=True, indent=1))
        for path in (*written, unfinished / _MANIFEST, *_folders(unfinished)):
            sync(path)
        self.check()
        unfinished.rename(self._directory / str(name))
        sync(self._directory)
        return sum(size for size, _ in files.values())

    def prune(self, keep: int, keep_every: int | None) -> None:
        """Remove all but the `keep` newest and those of every `keep_every` steps."""
        self.check()
        for name in names(self._directory)[:-keep]:
            kept = keep_every is not None and name.step % keep_every == 0
            if not kept and name.attempt <= self.number:
                # Half of it removed must not look like a checkpoint.
                removed = self._directory / f"{_REMOVED}{name}"
                (self._directory / str(name)).rename(removed)
                shutil.rmtree(removed, ignore_errors=True)

    def check(self) -> None:
        """Raise if somebody has claimed the next attempt since, or the directory is gone."""
        if not self._directory.is_dir():
            msg = (
                f"the directory of the checkpoints must stay, but {self._directory} is gone: was "
                f"it removed, or its disk unmounted?"
            )
            raise FileNotFoundError(msg)
        newest, path = max(_claims(self._directory), default=(0, Path()))
        if newest > self.number:
            msg = (
                f"one run at a time must write to {self._directory}, but this is attempt "
                f"{self.number} and attempt {newest} has begun ({_who(path)}): this run is the "
                f"older one and must end; give it a directory of its own if both are wanted"
            )
            raise RuntimeError(msg)

    def _claim(self) -> int:
        while True:
            claimed = [number for number, _ in _claims(self._directory)]
            used = [name.attempt for name in names(self._directory)]
            number = max([0, *claimed, *used]) + 1
            try:
                with (self._directory / f"attempt-{number:04d}.json").open("x") as file:
                    json.dump(_self_description(), file)
            except FileExistsError:
                continue  # another one was quicker: so this one is the newer
            return number

    def _remove_leftovers(self) -> None:
        """Remove what earlier attempts were killed over."""
        for entry in list(self._directory.iterdir()):
            for prefix in (_UNFINISHED, _REMOVED):
                name = Name.parse(entry.name.removeprefix(prefix))
                if entry.name.startswith(prefix) and name and name.attempt < self.number:
                    shutil.rmtree(entry, ignore_errors=True)

    def unfinished(self, name: Name) -> Path:
        """Return where a checkpoint is written."""
        return self._directory / f"{_UNFINISHED}{name}"


def verified(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint, after reading every byte of it.

    Raises:
        UnusableError: where anything is not as it was written; says what.
    """
    try:
        manifest = _read_manifest(path)
        for file, (size, digest) in manifest["files"].items():
            _check_file(path, file, size, digest)
    except FileNotFoundError as error:
        name = Path(str(error.filename)).name
        msg = f"{name} is missing"
        raise UnusableError(msg) from error
    except OSError as error:
        msg = f"it cannot be read ({error})"
        raise UnusableError(msg) from error
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        signed = json.loads((path / _MANIFEST).read_bytes())
        manifest: dict[str, Any] = signed["manifest"]
        text = json.dumps(manifest, sort_keys=True)
        intact = hashlib.sha256(text.encode()).hexdigest() == signed["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        msg = f"{_MANIFEST} is damaged"
        raise UnusableError(msg) from error
    if not intact:
        msg = f"the checksum of {_MANIFEST} is wrong"
        raise UnusableError(msg)
    if manifest.get("format") != FORMAT:
        msg = f"its format is {manifest.get('format')!r}, and this pardata reads {FORMAT}"
        raise UnusableError(msg)
    return manifest


def _check_file(path: Path, file: str, size: int, digest: str) -> None:
    found = path / file
    if ".." in found.parts or path not in found.parents:
        msg = f"{file!r} is no name of a file in it"
        raise UnusableError(msg)
    if found.stat().st_size != size:
        msg = f"{file} has {found.stat().st_size:,} bytes and should have {size:,}"
        raise UnusableError(msg)
    if _size_and_digest(found)[1] != digest:
        msg = f"the checksum of {file} is wrong"
        raise UnusableError(msg)


def _size_and_digest(path: Path) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def _claims(directory: Path) -> list[tuple[int, Path]]:
    found = [(re.fullmatch(r"attempt-(\d{4,})\.json", p.name), p) for p in directory.iterdir()]
    return [(int(match[1]), path) for match, path in found if match]


def _self_description() -> dict[str, object]:
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {"host": socket.gethostname(), "process": os.getpid(), "since": since}


def _who(claim: Path) -> str:
    try:
        facts = json.loads(claim.read_text())
        return f"process {facts['process']} on {facts['host']}, since {facts['since']}"
    except (OSError, ValueError, TypeError, KeyError):  # being written, or removed by a third
        return "by another process"


def _folders(path: Path) -> list[Path]:
    return [folder for folder in path.rglob("*") if folder.is_dir()] + [path]
