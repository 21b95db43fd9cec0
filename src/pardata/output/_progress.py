"""A progress bar on rank 0."""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, TypeVar

from torch import Tensor

from pardata.ranks._arguments import check_integer
from pardata.ranks._world import require_world

_T = TypeVar("_T")


def progress(
    iterable: Iterable[_T],
    description: str = "",
    *,
    total: int | None = None,
    batch_size: int | None = None,
) -> "Progress[_T]":
    """Iterate over `iterable` with a progress bar on rank 0, quiet on the other ranks.

    On a terminal it is a ``tqdm`` bar; where there is no terminal, or no tqdm, a line every ten
    seconds and one at the end. All on standard error. ``show(loss=…)`` on the result adds values;
    tensors are read only when they are drawn, some ten times a second, so showing a loss does
    not make a GPU wait at each step. Not collective.

    Args:
        iterable: what to iterate over, a loader for example.
        description: stands before the bar.
        total: number of items; ``len(iterable)`` if it has one, which the loader of a stream may
            not.
        batch_size: samples in an item, over all ranks, for the samples per second; the loader's
            own for a loader.

    Raises:
        TypeError, ValueError: for what cannot be iterated over, and for what is no integer from 0
            up; on every rank.

    >>> bar = progress([1, 2], "adding")
    >>> for number in bar:
    ...     bar.show(number=number)
    """
    if not hasattr(iterable, "__iter__") and not hasattr(iterable, "__getitem__"):
        msg = f"`iterable` must be something to iterate over, but is {iterable!r}"
        raise TypeError(msg)
    for name, number in {"total": total, "batch_size": batch_size}.items():
        if number is not None:
            check_integer(name, number, least=0)
    if total is None:
        total = _length(iterable)
    if batch_size is None:
        own = getattr(iterable, "batch_size", None)
        batch_size = own if isinstance(own, int) else None
    display = _display(description, total) if require_world("progress").is_main else None
    return Progress(iterable, display, batch_size)


class Progress(Generic[_T]):
    """An iterable that shows how far it is; made by `progress`."""

    def __init__(
        self, iterable: Iterable[_T], display: "_Bar | _Lines | None", batch_size: int | None
    ) -> None:
        self._iterable = iterable
        self._display = display
        self._batch_size = batch_size
        self._values: dict[str, Any] = {}

    def show(self, **values: Any) -> None:
        """Show these values (numbers, tensors of one number, text) with the next drawing.

        Raises:
            TypeError: for a tensor or array of more than one number; names it.
        """
        for name, value in list(values.items()):
            count = value.numel() if isinstance(value, Tensor) else getattr(value, "size", 1)
            if hasattr(value, "item") and count != 1:
                kind = "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                msg = (
                    f"`{name}` must be one number to be shown, but is {kind} of {count}: take its "
                    f"mean, say"
                )
                raise TypeError(msg)
            if isinstance(value, Tensor):
                values[name] = value.detach()  # drawn later: its graph need not live until then
        self._values.update(values)

    def __iter__(self) -> Iterator[_T]:
        """Iterate, once."""
        if self._display is None:
            yield from self._iterable
            return
        start = drawn = time.perf_counter()
        done = 0
        try:
            for item in self._iterable:
                yield item
                done += 1
                now = time.perf_counter()
                if now - drawn > self._display.pause:
                    drawn = now
                    self._display.draw(done, now - start, self._text(done, now - start))
        finally:
            seconds = time.perf_counter() - start
            self._display.close(done, seconds, self._text(done, seconds))

    def _text(self, done: int, seconds: float) -> str:
        shown = {name: _short(value) for name, value in self._values.items()}
        if self._batch_size and seconds > 0:
            shown["samples/s"] = f"{done * self._batch_size / seconds:,.0f}"
        return ", ".join(f"{name} {text}" for name, text in shown.items())


class _Bar:
    """tqdm, told what to write at its right end only when it draws."""

    pause = 0.1  # seconds from one drawing to the next

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def draw(self, done: int, _: float, text: str) -> None:
        self._bar.n = done
        self._bar.set_postfix_str(text)

    def close(self, done: int, seconds: float, text: str) -> None:
        self.draw(done, seconds, text)
        self._bar.close()


class _Lines:
    """For log files: a line now and then."""

    pause = 10.0

    def __init__(self, description: str, total: int | None) -> None:
        self._head = f"{description}: " if description else ""
        self._of = "" if total is None else f"/{total}"

    def draw(self, done: int, seconds: float, text: str) -> None:
        tail = f", {text}" if text else ""
        print(f"{self._head}{done}{self._of} in {seconds:.1f} s{tail}", file=sys.stderr, flush=True)

    close = draw


def _display(description: str, total: int | None) -> _Bar | _Lines:
    if sys.stderr.isatty():
        try:
            from tqdm import tqdm  # noqa: PLC0415  # an extra, and only wanted on a terminal
        except ImportError:
            pass  # the lines say the same
        else:
            return _Bar(tqdm(desc=description or None, total=total))
    return _Lines(description, total)


def _length(iterable: Iterable[Any]) -> int | None:
    try:
        return len(iterable) if isinstance(iterable, Sized) else None
    except TypeError:  # it has a __len__, as every loader, and yet no length
        return None


def _short(value: Any) -> str:
    if hasattr(value, "item"):
        value = value.item()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
