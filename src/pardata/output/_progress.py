"""A progress bar on rank 0."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from pardata._validation import check_int
from pardata.environment._world import require_world

T = TypeVar("T")


def progress(
    iterable: Iterable[T],
    description: str = "",
    *,
    total: int | None = None,
    batch_size: int | None = None,
) -> "Progress[T]":
    """Iterate over `iterable` with a progress bar on rank 0, quiet on the other ranks.

    On a terminal it is a ``tqdm`` bar. Without a terminal, or without tqdm, it is a line every ten
    seconds and one at the end. All goes to standard error. ``show(loss=…)`` on the result adds
    values. It reads tensors only when it draws them, some ten times a second. So showing a loss
    does not make a GPU wait at each step. Not collective.

    Args:
        iterable: what to iterate over, a loader for example.
        description: stands before the bar.
        total: number of items. It is ``len(iterable)`` if not given, which the loader of a stream
            may not have.
        batch_size: samples in an item, over all ranks, for the samples per second; the loader's own
            for a loader.

    Raises:
        TypeError, ValueError: a number is no integer from 0 up; on every rank.

    >>> bar = progress([1, 2], "adding")
    >>> for number in bar:
    ...     bar.show(number=number)
    """
    for name, number in {"total": total, "batch_size": batch_size}.items():
        if number is not None:
            check_int(name, number, least=0)
    if total is None and isinstance(iterable, Sized):
        with suppress(TypeError):  # a loader of a stream has a __len__ that raises
            total = len(iterable)
    if batch_size is None and isinstance(size := getattr(iterable, "batch_size", None), int):
        batch_size = size
    return Progress(iterable, description, total, batch_size)


class Progress(Generic[T]):
    """An iterable that shows how far it is; made by `progress`."""

    def __init__(
        self, iterable: Iterable[T], description: str, total: int | None, batch_size: int | None
    ) -> None:
        self._iterable, self._batch_size = iterable, batch_size
        self._is_shown = require_world("progress", is_collective=False).is_main
        self._bar = _bar(description, total) if self._is_shown else None
        self._head = f"{description}: " if description else ""
        self._of = "" if total is None else f"/{total}"
        self._values: dict[str, Any] = {}

    def show(self, **values: Any) -> None:
        """Show these values (numbers, tensors of one number, text) with the next drawing."""
        for name, value in values.items():
            # Detached, because a tensor that is drawn later would keep its graph alive.
            self._values[name] = value.detach() if isinstance(value, Tensor) else value

    def __len__(self) -> int:
        return len(cast("Sized", self._iterable))

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items, once."""
        if not self._is_shown:
            yield from self._iterable
            return
        pause = 10.0 if self._bar is None else 0.1  # seconds between two drawings
        clock, is_ending = time.perf_counter, sys.is_finalizing
        start = drawn = clock()
        done = 0
        try:
            for item in self._iterable:
                yield item
                done += 1
                now = clock()
                if now - drawn > pause:
                    drawn = now
                    self._draw(done, now - start)
        finally:
            if not is_ending():  # at interpreter exit names of modules may be gone
                self._draw(done, clock() - start)
                if self._bar is not None:
                    self._bar.close()

    def _draw(self, done: int, seconds: float) -> None:
        shown = [f"{name} {_short(value)}" for name, value in self._values.items()]
        if self._batch_size and seconds > 0:
            shown.append(f"samples/s {done * self._batch_size / seconds:,.0f}")
        if self._bar is not None:
            self._bar.n = done
            self._bar.set_postfix_str(", ".join(shown))
        elif sys.stderr is not None:  # None in a daemon
            line = f"{self._head}{done}{self._of} in {seconds:.1f} s"
            print(", ".join([line, *shown]), file=sys.stderr)  # Python flushes it


def _bar(description: str, total: int | None) -> Any:
    """Return a bar of tqdm, or None without a terminal or without tqdm."""
    if getattr(sys.stderr, "isatty", bool)():  # a stream of the user's may have none
        with suppress(ImportError):  # plain lines replace the bar
            from tqdm import tqdm  # noqa: PLC0415  # an extra, and only wanted on a terminal

            return tqdm(desc=description or None, total=total)
    return None


def _short(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    return f"{value:.4g}" if isinstance(value, float) else str(value)
