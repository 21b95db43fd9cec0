"""The directory of a run's checkpoints, as rank 0 writes to it: each is complete or not there.

A checkpoint is written below a name of its own, synced to the disk, and renamed. So what has a
checkpoint's name is complete, whatever is killed when.

A name begins with the number of an attempt at the run. A writer claims the next number by a file
that must not exist yet. It looks for a higher number before it adds or removes anything. So the
older of two writers stops. What it had still to add is neither newer than what the other one wrote
nor in its place.
"""

import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pardata.checkpoint._files import STATE, Manifest, Written, save, sync, write_manifest
from pardata.checkpoint._names import Name, Retention, entries, names
from pardata.environment._logger import get_logger

_log = get_logger(__name__)

_UNFINISHED = ".unfinished-"  # begins the name of what is being written, or removed


class Attempt:
    """A right to write in a directory, from the first `claim` until somebody else claims the next.

    Attributes:
        number: of the claim, or 0 before the first.
    """

    def __init__(self, directory: Path) -> None:
        self.number = 0
        self._directory = directory
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        # No two are the same, also if the directory was emptied and the numbers begin anew.
        token = os.urandom(8).hex()
        self._text = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n{token}"

    def claim(self) -> None:
        """Claim the next number, in a directory that is made if it is not there.

        Raises:
            OSError: if nothing can be written there.
            RuntimeError: if somebody else came after this one's last claim.
        """
        self.check()  # before anything is made
        taken = [*_claims(self._directory), *(name.attempt for name in names(self._directory))]
        self._directory.mkdir(parents=True, exist_ok=True)
        number = (self.number or max(taken, default=0)) + 1
        # After a claim of its own the very next number, or none: a run that has been told that it
        # is the older one must not become the newest by trying again.
        while not self._write_claim(number) and self.number == 0:
            number += 1  # another one was quicker: so this one will be the newer
        self.number = number
        self.check()
        for older in _claims(self._directory):
            if older < number:
                self._path(older).unlink(missing_ok=True)

    def check(self) -> None:
        """Raise if somebody has claimed since this one did, or the directory is gone."""
        if self.number == 0:
            return
        if not _claims(self._directory) and self._directory.is_dir():
            # Somebody has emptied it, and not written yet.
            self._write_claim(self.number)
        claims = _claims(self._directory)
        if not claims:
            raise FileNotFoundError(
                f"the directory of the checkpoints must stay, but {self._directory} is gone: was "
                f"it removed, or its disk unmounted?"
            )
        newest, text = max(claims.items())
        if text != self._text:
            who = text.partition("\n")[0] or "by another process"  # it has not written its name yet
            raise RuntimeError(
                f"one run at a time must write to {self._directory}, but this is attempt "
                f"{self.number} and attempt {newest} has begun ({who}): this run is the "
                f"older one and must end; give it a directory of its own if both are wanted, and "
                f"make only one Checkpointer of a directory in a process"
            )

    def _path(self, number: int) -> Path:
        return self._directory / f"attempt-{number:04d}.txt"

    def _write_claim(self, number: int) -> bool:
        """Claim a number, and return whether no other process has."""
        path = self._path(number)
        try:
            with path.open("x") as file:
                file.write(self._text)
        except FileExistsError:
            return False
        except OSError:
            path.unlink(missing_ok=True)  # who cannot write must not keep others from it
            raise
        return True


def _claims(directory: Path) -> dict[int, str]:
    """Return the text of each claim, by its number."""
    found = {}
    for path in entries(directory):
        if match := re.fullmatch(r"attempt-(\d{4,})\.txt", path.name):
            with suppress(FileNotFoundError):  # removed in this very moment
                found[int(match[1])] = path.read_text(errors="ignore")
    return found


class Folder:
    """Writes checkpoints into a directory, and removes those that are not to be kept.

    Args:
        directory: made by the first one.
        retention: says which ones are kept.
    """

    def __init__(self, directory: Path, retention: Retention) -> None:
        self._directory = directory
        self._retention = retention
        # The first save, which shows where they go; the others are for DEBUG.
        self._log, self._later = _log.info, "; later saves are logged at DEBUG"
        self._attempt = Attempt(directory)
        self._name = Name(0, 0)  # until the first
        self._began = 0.0

    def begin(self, step: int) -> Path:
        """Return the folder where a checkpoint is to be written before it has its name."""
        self._began = time.perf_counter()
        with self._cleaned_after_errors(step):
            if self._attempt.number == 0 or step <= self._name.step:
                # A step that comes again is newer than the first one all the same.
                self._attempt.claim()
            self._attempt.check()
            self._remove_unfinished()  # left by one that stopped half-way, or was killed
            self._name = Name(self._attempt.number, step)
            path = self._directory / f"{_UNFINISHED}{self._name}"
            path.mkdir()
            return path

    def finish(self, begun: Path | None, facts: Manifest, contents: Any, written: Written) -> None:
        """Write rank 0's part, make all that is there a checkpoint, and prune.

        Args:
            begun: what `begin` returned for this step, if it was called.
            facts: of the manifest.
            contents: of the file of rank 0.
            written: for the parts of all ranks.
        """
        step: int = facts["step"]
        path = begun or self.begin(step)
        with self._cleaned_after_errors(step):
            digests = written()
            save(contents, path / STATE)
            size = write_manifest(path, facts, digests)
            self._attempt.check()
            path.rename(self._directory / str(self._name))
            sync(self._directory)
            self._prune()
        figures = step, self._directory, size / 1e6, time.perf_counter() - self._began
        self._log(f"pardata saved step %d to %s, %.1f MB in %.2f s{self._later}", *figures)
        self._log, self._later = _log.debug, ""

    def _remove_unfinished(self) -> None:
        """Remove what this attempt and earlier ones have begun."""
        for entry in list(self._directory.glob(f"{_UNFINISHED}*")):
            name = Name.parse(entry.name.removeprefix(_UNFINISHED))
            if name is not None and name.attempt <= self._attempt.number:
                shutil.rmtree(entry, ignore_errors=True)

    def _prune(self) -> None:
        self._attempt.check()
        for name in self._retention.outdated(self._directory, names(self._directory)):
            if name.attempt <= self._attempt.number:
                # Half of it removed must not look like a checkpoint.
                removed = self._directory / f"{_UNFINISHED}{name}"
                with suppress(FileNotFoundError):  # the older run was at it when this one began
                    (self._directory / str(name)).rename(removed)
                    shutil.rmtree(removed, ignore_errors=True)

    @contextmanager
    def _cleaned_after_errors(self, step: int) -> Iterator[None]:
        """Remove what was begun if it fails, and say which step it was of."""
        try:
            yield
        except BaseException as error:
            self._remove_unfinished()
            if isinstance(error, OSError):
                self._attempt.check()  # it may know why
                if error.errno is not None:
                    text = f"{error.strerror}, while saving step {step}: earlier checkpoints"
                    text += f" are still in {self._directory}"
                    raise OSError(error.errno, text, error.filename) from error
            raise
