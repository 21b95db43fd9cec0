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
from datetime import timedelta
from threading import Event, Thread

import torch.distributed as dist

from pardata.environment._logger import get_logger
from pardata.environment._world import GroupState
from pardata.process_group._rank_status import RankStatus, rank_status, status_table
from pardata.store._client import SERVER, StoreClient, set_once, texts_of
from pardata.store._current_op import OpRecord, current_op
from pardata.store._remote_error import is_secondary

_log = get_logger(__name__)

_TICK, _SHORTEST = 1.0, 0.1  # seconds between two looks, and the least for a short `after`
_PATIENCE = 5.0  # seconds for the thread to end
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
        self._group, self._stopped = state.group, Event()
        client = state.client
        store = dist.PrefixStore("watchdog", client.request(lambda store: store.clone()))
        self._client = StoreClient(store, timedelta(0), client.rank, client.size)
        # Rank 0 logs, if it answers: it waits less long for the others' status.
        self._patience = (1 if client.rank == 0 else 2) * self._tick + _GRACE
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
        self.join(_PATIENCE)

    def run(self) -> None:
        """Look until the group has ended, or its store."""
        while not self._stopped.wait(self._tick) and dist.group.WORLD is self._group:
            try:
                self._look()
            except Exception as error:  # noqa: BLE001  # a handler of the log may raise anything
                if is_secondary(error):  # the store has ended, or does not answer
                    return
                traceback.print_exc()  # as `logging` does; the next look may be fine

    def _look(self) -> None:
        record, now = current_op.record, time.monotonic()
        frame = sys._current_frames().get(self._watched)  # noqa: SLF001  # its documented name
        if frame is None:
            return
        call, since, step = record
        waits = now - since if call or step is not None else 0.0
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
        elif not self._has_asked and now - self._answered > self._patience:
            self._log_once()

    def _news(self, status: RankStatus) -> bool:
        """Return whether a rank began the stall; once this one has answered, whether it is over."""
        key = f"{self._number}/{'began' if self._answered is None else 'over'}"
        try:
            return self._client.request(lambda store: store.check([key]))
        except TimeoutError:
            _log.warning("%s does not answer; this rank is %s", SERVER, status.text)
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
        _log.warning(status_table(known, size))

    def _end_stall(self) -> None:
        key = f"{self._number}/over"
        seconds = self._client.request(lambda store: store.get(key)).decode()
        if self._logs:
            _log.warning("the run continues after %s s", seconds)
        self._number, self._answered, self._logs = self._number + 1, None, False
