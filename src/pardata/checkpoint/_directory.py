"""The directory of a run's checkpoints, written by rank 0: a checkpoint is complete or absent.

Here are the names of checkpoints, in order, and the choice of those to remove.

A checkpoint is written to a folder with a temporary name, synced to the disk, and renamed. So a
folder with a checkpoint's name is complete, whenever a process is killed.

A name begins with the number of the attempt, one above the highest in the directory. The folder
`owner` holds one empty file, whose name is the identity of the writer. At its first save a writer
renames the file that it saw when it was made or restored. Of several writers one can do so. Each
opens its file before each rename and removal. So the older of two writers raises an error.
"""

import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isnan
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

from pardata._validation import check_int, check_text
from pardata.checkpoint._manifest import Record, UnusableError, read_manifest, sync, write_manifest
from pardata.environment._logger import get_logger

_log = get_logger(__name__)

At: TypeAlias = int | str | None  # a step, "best", or the newest

_OWNER, _NOBODY = "owner", "nobody"
_UNFINISHED = ".unfinished-"  # the prefix of a folder that is being written or removed


class CheckpointName(NamedTuple):
    """The name of a checkpoint; the newest is the largest."""

    attempt: int
    step: int

    def __str__(self) -> str:
        return f"attempt-{self.attempt:04d}-step-{self.step:09d}"

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        """Return the name of which `text` is the `str`, or None."""
        match = re.fullmatch(r"attempt-(\d{4,})-step-(\d{9,})", text, re.ASCII)
        name = match and cls(int(match[1]), int(match[2]))
        return name if str(name) == text else None


def checkpoint_names(directory: Path, prefix: str = "") -> list[CheckpointName]:
    """Return the names of all checkpoints, from the oldest to the newest.

    Args:
        directory: need not exist.
        prefix: the prefix of the names to return.
    """
    try:
        entries = [entry.name for entry in directory.iterdir() if entry.name.startswith(prefix)]
    except FileNotFoundError:
        return []
    return sorted(filter(None, (CheckpointName.parse(e.removeprefix(prefix)) for e in entries)))


class Retention:
    """Selects the checkpoints to remove, by the arguments of `Checkpointer`.

    Raises:
        ValueError: `keep` is below 1.
        TypeError: `keep` is no integer, or `keep_best` no name.
    """

    def __init__(self, keep: int, keep_best: str | None) -> None:
        check_int("keep", keep, least=1)
        check_text("keep_best", keep_best or "")
        self._keep = keep
        self._by = keep_best and keep_best.removeprefix("-")
        self._sign = 1 if keep_best == self._by else -1

    def check_value(self, objects: Mapping[str, Any]) -> None:
        """Raise a `TypeError` if the value named by `keep_best` is missing or no number."""
        value = objects.get(self._by or "", "missing")
        if self._by is not None and type(value) not in (int, float, type(None)):
            msg = f"`{self._by}` must be a number for keep_best, not {value}: pass float(…) or None"
            raise TypeError(msg)

    def best(self, directory: Path, existing: list[CheckpointName]) -> list[CheckpointName]:
        """Return the checkpoint with the best value, the first of several, or nothing."""
        scores: dict[CheckpointName, float] = {}
        for name in existing if self._by is not None else ():
            # An unusable checkpoint, or removed in the meantime.
            with suppress(UnusableError, OSError):
                value = read_manifest(directory / str(name))["numbers"].get(self._by)
                if value is not None and not isnan(value):
                    scores[name] = self._sign * value
        return [max(scores, key=lambda name: scores[name])] if scores else []

    def outdated(self, directory: Path, existing: list[CheckpointName]) -> list[CheckpointName]:
        """Return the checkpoints to remove of `existing` ones, which are in order of age."""
        kept = {*existing[-self._keep :], *self.best(directory, existing)}
        return [name for name in existing if name not in kept]


class CheckpointDirectory:
    """Writes checkpoints to a directory, and removes old ones.

    Args:
        directory: the first save creates it.
        retention: selects the checkpoints to remove.
    """

    def __init__(self, directory: Path, retention: Retention) -> None:
        self.directory, self.retention = directory, retention
        since, number = time.strftime("%Y-%m-%d %H.%M.%S %z"), os.urandom(8).hex()
        self._me = f"process {os.getpid()} on {socket.gethostname()}, since {since}, {number}"
        self._owner = directory / _OWNER
        self._last = self._current_owner()  # the owner that this run may replace, then this run
        self._name = CheckpointName(0, 0)  # until the first save
        self._began = 0.0
        self._writing = Lock()  # held by a thread that is unknown to the saver after Ctrl-C

    def __reduce__(self) -> Any:  # a copy in another process is another writer
        return type(self), (self.directory, self.retention)

    @property
    def _unfinished(self) -> Path:
        return self.directory / f"{_UNFINISHED}{self._name}"

    def newest_first(self, at: At) -> list[CheckpointName]:
        """Return the names of the checkpoints at `at`, from the newest to the oldest."""
        if self._last != self._me:  # if another run replaces this owner, `begin` raises
            self._last = self._current_owner()
        existing = checkpoint_names(self.directory)
        if not existing and CheckpointName.parse(self.directory.name) is not None:
            what = f"must be a run's, but {self.directory} is one checkpoint: pass its parent"
            raise ValueError(f"`directory` {what}")
        best = self.retention.best(self.directory, existing) if at == "best" else []
        found = best or [name for name in reversed(existing) if at in (None, name.step)]
        if not found and at is not None:
            steps = ", ".join(str(step) for step in sorted({name.step for name in existing}))
            steps += ", without the value of `keep_best`" if steps and at == "best" else ""
            what = f"must be a saved step, but is {at}: {self.directory} has {steps or 'none'}"
            raise ValueError(f"`at` {what}")
        return found

    def begin(self, step: int) -> Path:
        """Create and return the temporary folder of a checkpoint."""
        self._began = time.perf_counter()
        with self._writing, self._cleaned_after_errors(step):
            if self._last != self._me:
                self._claim()
            self._check_owner()
            existing = checkpoint_names(self.directory)
            # Temporary folders of a run that was killed, or still writes.
            stale = checkpoint_names(self.directory, _UNFINISHED)
            attempt = self._name.attempt
            if attempt == 0 or step <= self._name.step:
                # A repeated step gets a new attempt, so that the later checkpoint is the newest.
                attempt = 1 + max((name.attempt for name in (*existing, *stale)), default=0)
            for name in stale:
                shutil.rmtree(self.directory / f"{_UNFINISHED}{name}", ignore_errors=True)
            self._name = CheckpointName(attempt, step)
            self._unfinished.mkdir()
            return self._unfinished

    def finish(self, facts: dict[str, Any], write: Callable[[], dict[str, Record]]) -> None:
        """Write the manifest, rename the temporary folder, and remove old checkpoints.

        Args:
            facts: entries of the manifest.
            write: writes the files, and returns their records.
        """
        step: int = facts["step"]
        with self._writing, self._cleaned_after_errors(step):
            size = write_manifest(self._unfinished, facts, write())
            self._check_owner()
            self._unfinished.rename(self.directory / str(self._name))
            sync(self.directory)
            self._check_owner()
            for name in self.retention.outdated(self.directory, checkpoint_names(self.directory)):
                # Renamed first: a half-removed folder must not have a checkpoint's name.
                removed = self.directory / f"{_UNFINISHED}{name}"
                with suppress(FileNotFoundError):  # the older run removes it at the same time
                    (self.directory / str(name)).rename(removed)
                shutil.rmtree(removed, ignore_errors=True)
        figures = step, self.directory, size / 1e6, time.perf_counter() - self._began
        _log.info("pardata saved step %d to %s, %.1f MB in %.2f s", *figures)

    def _current_owner(self) -> str:
        return next((file.name for file in self._owner.glob("process *")), _NOBODY)

    def _claim(self) -> None:
        """Become the owner after `_last`. An `OSError` is raised if another run was first."""
        if not self.directory.exists():
            self.directory.resolve().mkdir(parents=True, exist_ok=True)  # the target of a link
        if self._last != _NOBODY and self._owner.exists():
            (self._owner / self._last).rename(self._owner / self._me)
        else:
            draft = self.directory / f".{_OWNER}-{self._me}"
            try:
                draft.mkdir()
                (draft / self._me).touch()
                draft.rename(self._owner)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        self._last = self._me

    def _check_owner(self) -> None:
        """Raise if another run has become the owner, or the directory is gone."""
        with suppress(FileNotFoundError, NotADirectoryError):
            (self._owner / self._last).open().close()  # from a network disk, not from a cache
            return
        if (now := self._current_owner()) not in (_NOBODY, self._last):
            who = now.rpartition(",")[0]
            raise RuntimeError(
                f"one run at a time must write to {self.directory}, but another one has begun "
                f"({who}): this run is the older one and must end; give each a directory of its own"
            )
        if self._last == self._me:
            if not self.directory.is_dir():
                what = "must stay, but is gone: was it removed, or its disk unmounted?"
                raise FileNotFoundError(f"{self.directory} {what}")
            self._claim()  # somebody has emptied the directory

    @contextmanager
    def _cleaned_after_errors(self, step: int) -> Iterator[None]:
        """Remove the temporary folder after an error, and name the step in an `OSError`."""
        try:
            yield
        except BaseException as error:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            if isinstance(error, OSError):
                self._check_owner()  # a newer owner explains the error
                if error.errno is not None:
                    text = f"{error.strerror}, while saving step {step}: earlier checkpoints"
                    text += f" are still in {self.directory}"
                    raise OSError(error.errno, text, error.filename) from error
            raise
