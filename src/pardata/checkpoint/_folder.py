"""The directory of a run's checkpoints, as rank 0 writes to it: each is complete or not there.

A checkpoint is written below a name of its own, synced to the disk, and renamed; so whatever is
killed when, what has a checkpoint's name is whole.
"""

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pardata.checkpoint._attempt import Attempt, Name, names
from pardata.checkpoint._disk import save, sync
from pardata.checkpoint._manifest import STATE, write_manifest
from pardata.ranks._logger import get_logger

_log = get_logger(__name__)

_UNFINISHED = ".unfinished-"
_REMOVED = ".removed-"


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is to be.

    Attributes:
        step: of the run.
        contents: what rank 0 writes.
        facts: of the manifest.
    """

    step: int
    contents: Any
    facts: Mapping[str, Any]


class Folder:
    """Writes drafts into a directory, and removes what is older than `keep` others.

    Args:
        directory: made by the first draft.
        keep: how many of the newest to keep.
        keep_every: also keep those of steps that are multiples of this.
    """

    def __init__(self, directory: Path, *, keep: int, keep_every: int | None) -> None:
        self._directory = directory
        self._keep = keep
        self._keep_every = keep_every
        self._attempt: Attempt | None = None
        self._name: Name | None = None
        self._unfinished: Path | None = None
        self._began = 0.0

    def write(self, draft: Draft) -> None:
        """Write a checkpoint that rank 0 has all of."""
        self.begin(draft.step)
        self.finish(draft)

    def begin(self, step: int) -> Path:
        """Return the folder where a checkpoint is to be written before it has its name."""
        self._began = time.perf_counter()
        with self._cleaned_after_errors(step):
            if self._attempt is None or (self._name is not None and step <= self._name.step):
                # A step that comes again is newer than the first one all the same.
                self._attempt = Attempt(self._directory, after=self._attempt)
                self._remove_leftovers(self._attempt.number)
            self._attempt.check()
            self._remove_unfinished()  # of a save that stopped half-way
            self._name = Name(self._attempt.number, step)
            self._unfinished = self._directory / f"{_UNFINISHED}{self._name}"
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished.mkdir()
            return self._unfinished

    def finish(self, draft: Draft) -> None:
        """Write rank 0's part, make all that was written since `begin` a checkpoint, and prune."""
        attempt, path = self._attempt, self._unfinished
        assert attempt is not None and path is not None  # noqa: S101, PT018  # `begin` was called
        with self._cleaned_after_errors(draft.step):
            save(draft.contents, path / STATE)
            size = write_manifest(path, {"step": draft.step, **draft.facts})
            attempt.check()
            path.rename(self._directory / str(self._name))
            self._unfinished = None
            sync(self._directory)
            self._prune(attempt)
        seconds = time.perf_counter() - self._began
        text = "saved step %d to %s, %.1f MB in %.2f s"
        _log.info(text, draft.step, self._directory, size / 1e6, seconds)

    def fail(self) -> None:
        """Remove what was begun, and raise where another run has taken over or all is gone."""
        self._remove_unfinished()
        if self._attempt is not None:
            self._attempt.check()

    def _remove_unfinished(self) -> None:
        if self._unfinished is not None:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished = None

    def _prune(self, attempt: Attempt) -> None:
        attempt.check()
        for name in names(self._directory)[: -self._keep]:
            kept = self._keep_every is not None and name.step % self._keep_every == 0
            if not kept and name.attempt <= attempt.number:
                # Half of it removed must not look like a checkpoint.
                removed = self._directory / f"{_REMOVED}{name}"
                with suppress(FileNotFoundError):  # the older run was at it when this one began
                    (self._directory / str(name)).rename(removed)
                    shutil.rmtree(removed, ignore_errors=True)

    def _remove_leftovers(self, attempt: int) -> None:
        """Remove what earlier attempts were killed over."""
        for entry in list(self._directory.iterdir()):
            for prefix in (_UNFINISHED, _REMOVED):
                name = Name.parse(entry.name.removeprefix(prefix))
                if entry.name.startswith(prefix) and name and name.attempt < attempt:
                    shutil.rmtree(entry, ignore_errors=True)

    @contextmanager
    def _cleaned_after_errors(self, step: int) -> Iterator[None]:
        """Remove what was begun where it fails, and say which step it was of."""
        try:
            yield
        except BaseException as error:
            self._remove_unfinished()
            if isinstance(error, FileNotFoundError) and self._attempt is not None:
                self._attempt.check()  # it may know why
            if not isinstance(error, OSError) or error.errno is None:
                raise
            msg = (
                f"{error.strerror}, while saving step {step}: the checkpoints before it stand in "
                f"{self._directory}"
            )
            raise OSError(error.errno, msg, error.filename) from error
