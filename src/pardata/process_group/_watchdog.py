"""A thread of each rank that looks for a stalled run; one rank logs where all of them are.

The thread sleeps, and looks once in a tick. A rank that waits for long begins a stall, which the
others see on the store: each writes its status, and one logs the table. Each look is one request,
at any number of ranks. Nothing is stopped.
"""

import atexit
import json
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread

import torch.distributed as dist

from pardata.environment._backend import flight_recorder
from pardata.environment._logger import get_logger
from pardata.environment._world import GroupState
from pardata.process_group._rank_status import RankStatus, rank_status, status_table
from pardata.store._client import SERVER, StoreClient, set_once, texts_of
from pardata.store._current_op import OpRecord, current_op

_log = get_logger(__name__)

_TICK, _SHORTEST = 1.0, 0.1  # seconds between two looks, and the least for a short `after`
_LATE = 5.0  # seconds by which a look is late only if the process was stopped
_GRACE = 0.5  # seconds in which a rank that runs looks and answers


class Watchdog(Thread):
    """Watches the thread that makes it, until its group ends or `stop` is called.

    Args:
        state: of the group.
        after: the seconds after which a rank that waits begins a stall.
    """

    def __init__(self, state: GroupState, after: float) -> None:
        super().__init__(name="pardata: watchdog", daemon=True)
        self._after, self._tick = after, min(_TICK, max(after / 4, _SHORTEST))
        self._group, self._backend, self._stopped = state.group, state.world.backend, Event()
        client = state.client
        store = dist.PrefixStore("watchdog", client.request(lambda store: store.clone()))
        self._client = StoreClient(store, timedelta(0), client.rank, client.size)
        self._looked, self._awake = time.monotonic(), 0.0
        self._number = 1  # the stall that is under way, or will be the next
        self._began: OpRecord | None = None  # the wait by which this rank began it
        self._answered: float | None = None  # when this rank wrote its status
        self._has_asked, self._logs = False, False  # who logs; whether this rank does
        atexit.register(self.stop)  # an adopted group stays, and so does one after an error
        current_op.begin()
        self._watched = current_op.thread
        self.start()

    def stop(self) -> None:
        """End the thread."""
        atexit.unregister(self.stop)
        current_op.thread = 0
        self._stopped.set()
        self.join(_LATE)

    def run(self) -> None:
        """Look until the group has ended, or its store."""
        with suppress(RuntimeError, TimeoutError):
            while not self._stopped.wait(self._tick) and dist.group.WORLD is self._group:
                try:
                    self._look()
                except (RuntimeError, TimeoutError):
                    raise
                except Exception as error:  # noqa: BLE001  # the next look may be fine
                    _warn(f"a look for stalls failed: {type(error).__name__}: {error}", once=True)

    def _look(self) -> None:
        record, now = current_op.record, time.monotonic()
        frame = sys._current_frames().get(self._watched)  # noqa: SLF001  # its documented name
        if frame is None:
            return
        if now - self._looked > self._tick + _LATE:
            self._awake = now
        self._looked = now
        call, since, step = record
        waits = now - max(since, self._awake) if call or step is not None else 0.0
        if self._began is not None and record is not self._began:
            over, seconds = f"{self._number}/over", f"{record[1] - self._began[1]:.0f}"
            self._client.request(lambda store: store.set(over, seconds))
            self._began = None
        news = self._news(rank_status(record, frame))
        if self._answered is None:
            if news or waits >= self._after:
                self._answer(rank_status(record, frame), is_first=not news, record=record)
        elif news:
            self._end_stall()
        elif not self._has_asked and now - self._answered > self._patience():
            self._log_once()

    def _patience(self) -> float:
        """Return for how long to wait for the others' status: rank 0 logs, if it answers."""
        return (1 if self._client.rank == 0 else 2) * self._tick + _GRACE

    def _news(self, status: RankStatus) -> bool:
        """Return whether a rank began the stall; once this one has answered, whether it is over."""
        key = f"{self._number}/{'began' if self._answered is None else 'over'}"
        try:
            return self._client.request(lambda store: store.check([key]))
        except TimeoutError:
            _warn(f"{SERVER} does not answer; this rank {status.text}")
            raise

    def _answer(self, status: RankStatus, *, is_first: bool, record: OpRecord) -> None:
        number, rank = self._number, str(self._client.rank)

        def answer(store: dist.Store) -> bool:
            store.set(f"at/{rank}", json.dumps([number, status]))
            return is_first and set_once(store, f"{number}/began", rank) == rank

        self._answered, self._has_asked = time.monotonic(), False
        if self._client.request(answer):
            self._began = record

    def _log_once(self) -> None:
        """Log the table, unless another rank does."""
        number, rank, size = self._number, str(self._client.rank), self._client.size

        def statuses(store: dist.Store) -> list[str | None] | None:
            if set_once(store, f"{number}/logs", rank) != rank:
                return None
            return texts_of(store, [f"at/{one}" for one in range(size)])

        self._has_asked = True
        if (texts := self._client.request(statuses)) is None:
            return
        self._logs = True
        found = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
        known = {rank: RankStatus(*one[1]) for rank, one in found.items() if one[0] == number}
        recorder = flight_recorder(self._backend)
        _warn("\n".join(filter(None, [status_table(known, size), recorder])))

    def _end_stall(self) -> None:
        key = f"{self._number}/over"
        seconds = self._client.request(lambda store: store.get(key)).decode()
        if self._logs:
            _warn(f"the run continues after {seconds} s")
        self._number, self._answered, self._logs = self._number + 1, None, False


def _warn(text: str, *, once: bool = False) -> None:
    try:
        _log.warning(text, once=once)
    except Exception:  # noqa: BLE001  # a handler of the user's own may raise anything
        traceback.print_exc()  # as `logging` does
