"""How long a loop waits for its data."""

import time


class Clock:
    """Two readings of the clock a batch: how long the loop waited, of how long it ran."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._end: float | None = None
        self.samples, self.waited = 0, 0.0

    def stop(self) -> None:
        self._end = time.perf_counter()

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
