"""A thread of each rank that looks for hangs: it sleeps, and looks once in a tick.

A rank that waits for long says so on the store, where all look. Then each says where it is, and one
logs a table (`Hang`). Nothing is stopped.
"""

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from weakref import ref

import torch.distributed as dist

from pardata.collective._hang import Hang, sign
from pardata.collective._whereabouts import whereabouts
from pardata.messages._doing import Note, doing
from pardata.messages._store import SERVER, Channel, answered, apart, bounded
from pardata.ranks._logger import get_logger

_log = get_logger(__name__)

_TICK, _LEAST = 1.5, 0.1  # seconds, at most and at least: each is a request
_LATE = 5.0  # seconds by which a look is late only if the process was stopped


class Watch:
    """Watches the thread that makes it until `end`, or until its group ends.

    Args:
        channel: of the group.
        after: the seconds after which a rank that waits says so.
    """

    def __init__(self, channel: Channel, after: float) -> None:
        self._after, self._most = after, channel.timeout.total_seconds() / 2
        self._looked, self._awake = time.monotonic(), 0.0
        self._group, self._pid, self._ended = ref(dist.group.WORLD), os.getpid(), threading.Event()
        store = answered(channel.timeout, lambda: apart(channel, "watch"))
        self._tick = min(_TICK, max(after / 4, _LEAST))
        self._channel = replace(channel, store=store, timeout=timedelta(seconds=self._tick))
        self._hang = Hang(self._channel, 1)
        self._began: Note | None = None  # the wait by which this rank has begun the hang
        doing.begin()
        self._watched = doing.thread
        self._thread = threading.Thread(target=self._run, name="pardata: watch", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    def end(self) -> None:
        """End, except in a forked child, which has no such thread."""
        atexit.unregister(self.end)
        if os.getpid() == self._pid:
            doing.thread = 0
            self._ended.set()
            self._thread.join(_LATE)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and the ranks see it
            sign(self._channel, is_here=True)
            while not self._ended.wait(self._pause()) and self._look():
                pass
            sign(self._channel, is_here=False)

    def _pause(self) -> float:
        left = self._after - self._waited(doing.now)
        return min(max(left, _LEAST), self._tick) if left > 0 else self._tick

    def _waited(self, note: Note) -> float:
        """Return for how many seconds this rank has been in one call, or step."""
        call, since, _, step = note
        return time.monotonic() - max(since, self._awake) if call or step is not None else 0.0

    def _look(self) -> bool:
        """Look whether this rank waits for long, or another says so; return whether to continue."""
        hang, note, now = self._hang, doing.now, time.monotonic()
        frame = sys._current_frames().get(self._watched)  # noqa: SLF001  # its only name
        group = self._group()
        if frame is None or group is None or dist.group.WORLD is not group:
            return False
        if now - self._looked > self._tick + _LATE:
            self._awake = now
        self._looked = now
        if self._began is not None and note is not self._began:
            hang.end(note[1] - self._began[1])
            self._began = None
        found = bounded(max(self._after, _LATE), hang.has_news)
        if not found:
            where = whereabouts(hang.number, note, frame).text
            _log.warning("%s does not answer; this rank %s", SERVER, where)
        if found not in ([False], [True]):
            return False
        if hang.is_told and found[0]:
            seconds, self._hang = hang.seconds(), Hang(self._channel, hang.number + 1)
            if hang.is_one:  # each step may take that long
                self._after = max(self._after, min(2.0 * seconds, self._most))
        elif not hang.is_told and (found[0] or self._waited(note) >= self._after):
            if not found[0] and hang.begin():
                self._began = note
            hang.tell(whereabouts(hang.number, note, frame))
        return True
