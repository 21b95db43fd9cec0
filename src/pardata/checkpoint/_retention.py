"""The names of checkpoints in a directory, in order, and the choice of those to remove."""

import re
from collections.abc import Mapping
from contextlib import suppress
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

from pardata._validation import check_int, check_text
from pardata.checkpoint._manifest import UnusableError, read_manifest


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


def newest_first(directory: Path, at: int | None) -> list[CheckpointName]:
    """Return the names of all checkpoints, or of those of a step, from the newest to the oldest."""
    existing = checkpoint_names(directory)
    if not existing and CheckpointName.parse(directory.name) is not None:
        raise ValueError(
            f"`directory` must be that of all checkpoints of a run, but {directory} is one of "
            f"them: pass {directory.parent}"
        )
    found = [name for name in reversed(existing) if at in (None, name.step)]
    if not found and at is not None:
        steps = ", ".join(str(step) for step in sorted({name.step for name in existing}))
        raise ValueError(
            f"`at` must be a step of which there is a checkpoint, but is {at}: {directory} has "
            f"{steps or 'none'}"
        )
    return found


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
            raise TypeError(
                f"`{self._by}` must be saved each time, as a number, because `keep_best` "
                f"compares it, but is {value}: pass float(…), or None if it is not known"
            )

    def outdated(self, directory: Path, existing: list[CheckpointName]) -> list[CheckpointName]:
        """Return the checkpoints to remove of `existing` ones, which are in order of age.

        If several have the best value, the first of them is kept.
        """
        kept = set(existing[-self._keep :])
        if self._by is not None:
            scores: dict[CheckpointName, float] = {}
            for name in existing:
                # An unusable checkpoint, or removed in the meantime.
                with suppress(UnusableError, OSError):
                    value = read_manifest(directory / str(name))["numbers"].get(self._by)
                    if value is not None and not isnan(value):
                        scores[name] = self._sign * value
            kept.update([max(scores, key=lambda name: scores[name])] if scores else [])
        return [name for name in existing if name not in kept]
