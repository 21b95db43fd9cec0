"""A watchdog thread on each rank: if the run stalls, one rank logs the status of all ranks.

The thread checks once a tick. A rank that waits for long writes a key to the store, which begins a
stall. Every rank sees the key and writes its status, and one rank logs the table. A check is one
request to the store, or two on an accelerator, at any number of ranks. The watchdog ends a process
only on an accelerator, if it waits for a failed rank, because its collective would wait until the
group's timeout.
"""

import atexit
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from threading import Event, Thread, current_thread
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from pardata.collectives._comm_errors import first_failure
from pardata.environment._device import has_accelerator_backend
from pardata.environment._logger import flush_output, get_logger
from pardata.environment._world import GroupState
from pardata.store._client import SERVER, StoreClient, multi_get_or_none, set_once
from pardata.store._current_op import LOADER, OpRecord, current_op, frames_of, location, user_frame
from pardata.store._rank_errors import format_rank_table, format_ranks, is_secondary

_log = get_logger(__name__)

_TICK, _SHORTEST = 1.0, 0.1  # seconds between two checks, and the minimum for a short `after`
_PATIENCE = 5.0  # seconds for the thread to end
_GRACE = 0.5  # seconds in which a running rank sees the stall and writes its status
_STUCK = 20.0  # seconds without progress, after which a rank ends if another rank has failed
_NO_ANSWER = "no answer: it has ended, is stopped, or C code holds the GIL"


class RankStatus(NamedTuple):
    """The status of a rank, as plain data.

    Attributes:
        text: its call of pardata, its line, and the step of its loader.
        waits: whether it waits for other ranks in that call.
        seconds: seconds since its last progress.
    """

    text: str
    waits: bool
    seconds: float


def rank_status(record: OpRecord, frame: FrameType) -> RankStatus:
    """Return this rank's status, from the record and innermost frame of its training thread."""
    call, since, step = record
    frames = frames_of(frame)
    user = user_frame(frames)
    # Otherwise pardata has called the user's code.
    is_inside = any(one.package == "pardata" for one in frames[user:])
    compiles = any(
        "/convert_frame.py:" in one.place or one.function.startswith("compile_fx")
        for one in frames
        if one.package == "torch"
    )
    waits = is_inside and call not in ("", LOADER) and not (compiles or current_op.leads)
    text = f"at {frames[user].place if is_inside else location(frames)}"
    if is_in := current_op.leads or call:
        text = f"in {is_in} {text}"
    if compiles:
        text = f"compiling {text}"
    if step:
        after = "after " * (call == LOADER)
        text = f"{text} ({after}step {step.number} of epoch {step.epoch})"
    return RankStatus(text, waits, time.monotonic() - since)


def status_table(found: Mapping[int, RankStatus], size: int) -> str:
    """Return which ranks wait for which, and a line for each set of ranks with equal status."""
    waiting = [rank for rank in found if found[rank].waits]
    others = [rank for rank in range(size) if rank not in waiting]
    who = "all ranks wait for each other"
    if not waiting:
        who = "a step does not end (after the last one, drop the iterator of the loader)"
    elif others:
        who = f"{format_ranks(waiting)} wait{'s' * (len(waiting) == 1)} for {format_ranks(others)}"
    seconds = max(found[rank].seconds for rank in waiting or found)
    rows = [found[rank].text if rank in found else _NO_ANSWER for rank in range(size)]
    return f"{who}, {seconds:.0f} s so far; nothing is stopped:\n{format_rank_table(rows)}"


class Watchdog(Thread):
    """Watches the thread that creates it, until the group ends or `stop` is called.

    Args:
        state: the state of the group.
        after: the seconds after which a rank that waits begins a stall.
    """

    def __init__(self, state: GroupState, after: float) -> None:
        super().__init__(name="pardata: watchdog", daemon=True)
        self._after, self._tick = after, min(_TICK, max(after / 4, _SHORTEST))
        self._is_current, self._stopped = state.is_current, Event()
        client = state.client
        store = client.request(lambda store: store.clone())
        self._client = StoreClient(store, timedelta(0), client.rank, client.size)
        # The failure of another rank, "" if there is none. None with gloo, which raises an error
        # itself.
        self._lost = "" if has_accelerator_backend(state.world.backend) else None
        # Rank 0 logs unless it is stuck, because it waits less time for the status of the others.
        self._patience = (1 if client.rank == 0 else 2) * self._tick + _GRACE
        self._number = 1  # the number of the current stall, or of the next one
        self._began: OpRecord | None = None  # the operation in which this rank began the stall
        self._answered: float | None = None  # the time when this rank wrote its status
        # Whether this rank has asked to log, and whether it logs.
        self._has_asked, self._logs = False, False
        atexit.register(self.stop)  # an adopted group is not destroyed, nor a group after an error
        current_op.begin()
        self._watched = current_op.thread
        self.start()

    def stop(self) -> None:
        """End the thread."""
        atexit.unregister(self.stop)
        current_op.thread = 0
        self._stopped.set()
        if current_thread() is not self:
            self.join(_PATIENCE)

    def run(self) -> None:
        """Check until the group, or its store, has ended."""
        while not self._stopped.wait(self._tick) and self._is_current():
            try:
                self._check()
            except Exception as error:  # noqa: BLE001  # a logging handler may raise anything
                if not is_secondary(error):
                    traceback.print_exc()  # as `logging` does; the next check may succeed
                elif not self._lost:  # the store has ended, or does not answer
                    return

    def _check(self) -> None:
        record, now = current_op.record, time.monotonic()
        frame = sys._current_frames().get(self._watched)  # noqa: SLF001  # a documented name
        if frame is None:
            return
        call, since, step = record
        if self._lost is not None:
            self._end_if_lost(since)
        waits = now - since if call or step is not None else 0.0
        if self._began is not None and record is not self._began:
            self._client.request(lambda store: store.set(f"watchdog/{self._number}/over", ""))
            self._began = None
        news = self._poll(rank_status(record, frame))
        if self._answered is None:
            if news or waits >= self._after:
                self._report_self(rank_status(record, frame), is_first=not news, record=record)
        elif news:
            if self._logs:
                _log.warning("the run continues after %.0f s", self._after + now - self._answered)
            self._number, self._answered, self._logs = self._number + 1, None, False
        elif not self._has_asked and now - self._answered > self._patience:
            self._log_once()

    def _end_if_lost(self, since: float) -> None:
        """End this process if another rank has failed and this one makes no progress.

        gloo raises an error if a peer is gone. With an accelerator the collective does not end, and
        the host waits.
        """
        if self._lost and time.monotonic() - since > _STUCK:
            _log.error("failed because %s; this rank waited for it", self._lost, ranks="all")
            flush_output()
            os._exit(1)
        failed = None if self._lost else first_failure(self._client, 0)[0]
        if failed is not None and failed.rank != self._client.rank:
            self._lost = f"rank {failed.rank} failed first: {failed.text}"

    def _poll(self, status: RankStatus) -> bool:
        """Return whether a stall has begun; after this rank's status, whether it is over."""
        key = f"watchdog/{self._number}/{'began' if self._answered is None else 'over'}"
        try:
            return self._client.request(lambda store: store.check([key]))
        except TimeoutError:
            _log.warning("%s does not answer; this rank is %s", SERVER, status.text)
            raise

    def _report_self(self, status: RankStatus, *, is_first: bool, record: OpRecord) -> None:
        number, rank = self._number, str(self._client.rank)

        def answer(store: dist.Store) -> bool:
            store.set(f"watchdog/at/{rank}", json.dumps([number, status]))
            return is_first and set_once(store, f"watchdog/{number}/began", rank) == rank

        self._answered, self._has_asked = time.monotonic(), False
        if self._client.request(answer):
            self._began = record

    def _log_once(self) -> None:
        """Log the table, unless another rank has."""
        number, rank, size = self._number, str(self._client.rank), self._client.size

        def statuses(store: dist.Store) -> list[str | None] | None:
            if set_once(store, f"watchdog/{number}/logs", rank) != rank:
                return None
            return multi_get_or_none(store, [f"watchdog/at/{one}" for one in range(size)])

        self._has_asked = True
        if (texts := self._client.request(statuses)) is None:
            return
        self._logs = True
        found = {rank: json.loads(text) for rank, text in enumerate(texts) if text}
        fresh = {rank: RankStatus(*one[1]) for rank, one in found.items() if one[0] == number}
        _log.warning(status_table(fresh, size))
