"""The names of checkpoints, which say which one is the newest."""

import re
from pathlib import Path
from typing import NamedTuple


class Name(NamedTuple):
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
