"""The names of checkpoints, and who may give them: of two runs in one directory, the newer one.

A name begins with the number of an attempt at the run. A writer claims the next number by a file
that must not exist yet, and looks for a higher one before it adds or removes anything. So of two
writers the older stops, and what it had still to add is neither newer than what the other one wrote
nor in its place.
"""

import errno
import json
import os
import re
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


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
        name = match and cls(int(match[1]), int(match[2]))
        return name if str(name) == text else None


def names(directory: Path) -> list[Name]:
    """Return the names of all checkpoints, from the oldest to the newest."""
    try:
        found = [Name.parse(entry.name) for entry in directory.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(name for name in found if name is not None)


class Attempt:
    """A right to write in a directory, until somebody claims the next one.

    Args:
        directory: made where it is not there.
        after: the attempt of this very run that the new one takes the place of.

    Raises:
        OSError: where nothing can be written there.
        RuntimeError: where somebody else came after `after`.
    """

    def __init__(self, directory: Path, *, after: "Attempt | None" = None) -> None:
        if after is not None:
            after.check()  # before anything is made
        if directory.exists() and not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._claimed = _self_description()
        self.number = self._claim() if after is None else self._succeed(after)
        self.check()
        for older, path in _claims(directory):
            if older < self.number:
                path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise if somebody has claimed another attempt since, or the directory is gone."""
        if not self._directory.is_dir():
            msg = (
                f"the directory of the checkpoints must stay, but {self._directory} is gone: was "
                f"it removed, or its disk unmounted?"
            )
            raise FileNotFoundError(msg)
        if not _claims(self._directory):
            with suppress(FileExistsError):
                self._write_claim(self.number)  # somebody has emptied it, and not written yet
        newest, path = max(_claims(self._directory), default=(0, Path()))
        if newest != self.number or _text(path) != self._claimed:
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
            with suppress(FileExistsError):  # another one was quicker: so this one is the newer
                self._write_claim(number)
                return number

    def _succeed(self, after: "Attempt") -> int:
        # The very next number, or none: a run that has been told that it is the older one must
        # not become the newest by trying again.
        number = after.number + 1
        with suppress(FileExistsError):
            self._write_claim(number)
        return number

    def _write_claim(self, number: int) -> None:
        path = self._directory / f"attempt-{number:04d}.json"
        with path.open("x") as file:
            try:
                file.write(self._claimed)
                file.flush()
            except OSError:
                path.unlink(missing_ok=True)  # who cannot write must not keep others from it
                raise


def _claims(directory: Path) -> list[tuple[int, Path]]:
    found = [(re.fullmatch(r"attempt-(\d{4,})\.json", p.name), p) for p in directory.iterdir()]
    return [(int(match[1]), path) for match, path in found if match]


def _self_description() -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    own = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
    # No two are the same, also where the directory was emptied and the numbers begin anew.
    return json.dumps({**own, "token": secrets.token_hex(8)})


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):  # removed by a third, or not ours
        return ""


def _who(claim: Path) -> str:
    try:
        facts = json.loads(_text(claim))
        return f"process {facts['process']} on {facts['host']}, since {facts['since']}"
    except (ValueError, TypeError, KeyError):  # being written
        return "by another process"
