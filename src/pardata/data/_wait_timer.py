"""Measures the waits of an epoch for batches, and how unequal the local batches are."""

import operator
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from pardata.data._plan import StepInfo
from pardata.store._current_op import LOADER, current_op

_END = (None, None, None)  # the item after the last step


class WaitTimer:
    """The seconds of an epoch, and the part of them spent in waiting for batches."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._end: float | None = None
        self.samples, self.waited = 0, 0.0
        self._loads = [0.0, 0.0, 0.0]  # sums of `StepInfo.loads`

    def timed_next(self, batches: Iterator[Any]) -> Any:
        """Return the next of `batches`, tuples that begin with the step, or `_END`."""
        asked, before, batch = self.seconds(), current_op.push(LOADER), _END
        try:
            batch = next(batches, _END)
        finally:
            current_op.pop(before, batch[0])
        self.waited += self.seconds() - asked
        return batch

    def count(self, step: StepInfo) -> None:
        """Add the samples and the loads of a step."""
        self.samples += step.samples
        self._loads = [*map(operator.add, self._loads, step.loads)]

    def stop(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Stop the timer, except at interpreter exit, when module globals may be gone."""
        if not is_ending():
            self._end = time.perf_counter()
            current_op.pop(current_op.push(""), None)

    def seconds(self) -> float:
        return (time.perf_counter() if self._end is None else self._end) - self._start

    def stats(self) -> dict[str, float]:
        seconds = max(self.seconds(), 1e-9)
        share, rate = self.waited / seconds, self.samples / seconds
        waits = {"seconds": seconds, "wait_seconds": self.waited, "wait_share": share}
        largest, by_number, mean = self._loads
        stats = {**waits, "samples": self.samples, "samples_per_second": rate}
        if mean:
            stats |= {"imbalance": largest / mean, "imbalance_by_number": by_number / mean}
        return stats
