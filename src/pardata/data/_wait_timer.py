"""Measures the time that a loop waits for data."""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from pardata.store._current_op import LOADER, current_op


class WaitTimer:
    """The seconds of an epoch, and the part of them spent in waiting for batches."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._end: float | None = None
        self.samples, self.waited = 0, 0.0

    def timed_next(self, batches: Iterator[Any], end: Any) -> Any:
        """Return the next of `batches`, tuples that begin with the step, or `end`."""
        asked, before, batch = self.seconds(), current_op.push(LOADER), end
        try:
            batch = next(batches, end)
        finally:
            current_op.pop(before, batch[0])
        self.waited += self.seconds() - asked
        return batch

    def stop(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Stop the timer, except at interpreter exit, when module globals may be gone."""
        if is_ending():
            return
        self._end = time.perf_counter()
        current_op.pop(current_op.push(""), None)

    def seconds(self) -> float:
        end = time.perf_counter() if self._end is None else self._end
        return end - self._start

    def stats(self) -> dict[str, float]:
        seconds = max(self.seconds(), 1e-9)
        return {
            "seconds": seconds,
            "wait_seconds": self.waited,
            "wait_share": self.waited / seconds,
            "samples": self.samples,
            "samples_per_second": self.samples / seconds,
        }
