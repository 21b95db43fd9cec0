"""Which checkpoints are kept: the newest, those of every so many steps, and the best."""

from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import Any

from pardata.checkpoint._files import UnusableError, read_manifest
from pardata.checkpoint._names import Name
from pardata.ranks._arguments import check_integer


class Retention:
    """Says which checkpoints are kept, by what `Checkpointer` is told.

    Raises:
        ValueError: for a `keep` or `keep_every` below 1.
        TypeError: for one that is no integer, and for a `keep_best` that is no name.
    """

    def __init__(self, keep: int, keep_every: int | None, keep_best: str | None) -> None:
        check_integer("keep", keep, least=1)
        check_integer("keep_every", 1 if keep_every is None else keep_every, least=1)
        if keep_best is not None and not (isinstance(keep_best, str) and keep_best.strip("-")):
            raise TypeError(
                f"`keep_best` must name a value that is saved, but is {keep_best!r}: pass a text, "
                f"as 'accuracy', or '-loss' where less is better"
            )
        self._keep = keep
        self._keep_every = keep_every
        self._by = keep_best and keep_best.removeprefix("-")
        self._sign = 1 if keep_best == self._by else -1
        self._values: dict[Name, float | None] = {}

    def check_value(self, objects: Mapping[str, Any]) -> None:
        """Raise where what the best is known by is not among what is saved."""
        if self._by is None:
            return
        what = repr(objects[self._by]) if self._by in objects else "missing"
        if what == "missing" or type(objects[self._by]) not in (int, float, type(None)):
            raise TypeError(
                f"`{self._by}` must be saved each time, as a number, for `keep_best` goes by it, "
                f"but is {what}: pass float(…), or None where it is not known"
            )

    def outdated(self, directory: Path, there: list[Name]) -> list[Name]:
        """Return which of the checkpoints that are there, from the oldest to the newest, to remove.

        Of several that are the best the first is kept.
        """
        kept = set(there[-self._keep :])
        if self._keep_every is not None:
            kept.update(name for name in there if name.step % self._keep_every == 0)
        if self._by is not None:
            self._values.update(
                (n, self._value(directory / str(n))) for n in there if n not in self._values
            )
            known = {n: self._sign * v for n in there if (v := self._values[n]) is not None}
            kept.update([max(known, key=lambda name: known[name])] if known else [])
        return [name for name in there if name not in kept]

    def _value(self, checkpoint: Path) -> float | None:
        """Return the value by which a checkpoint may be the best, or None if it is not known."""
        try:
            value: float | None = read_manifest(checkpoint)["numbers"].get(self._by)
        except (UnusableError, OSError):  # of no use, or removed meanwhile
            return None
        return None if value is None or isnan(value) else value
