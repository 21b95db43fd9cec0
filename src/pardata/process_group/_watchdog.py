"""A hang: a thread of each rank looks for it, each then says where it is, one logs a table.

The thread sleeps, and looks once in a tick. A rank that waits for long says so on the store, where
all look. Each rank makes so many requests, at any number of ranks; only the one that logs reads
what all say. Nothing is stopped.
"""

import atexit
import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from weakref import ref

import torch.distributed as dist

from pardata.environment._cpu import state_of
from pardata.environment._device import flight_recorder
from pardata.environment._logger import get_logger
from pardata.process_group._rank_status import Whereabouts, headline, stacks, table, whereabouts
from pardata.store._client import SERVER, Channel, answered, apart, bounded, came, texts_of
from pardata.store._current_op import Note, doing
from pardata.store._remote_error import one_line

_log = get_logger(__name__)

_TICK, _LEAST = 1.5, 0.1  # seconds, at most and at least: each is a request
_LATE = 5.0  # seconds by which a look is late only if the process was stopped
_GRACE = 0.5  # seconds in which a rank that runs does what it is asked for
_MOST = 4  # stacks in the log; the file has all
_LEFT = '["", 0]'  # the stack of a rank that has no process


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
            while not self._ended.wait(self._pause()) and self._goes_on():
                pass
            sign(self._channel, is_here=False)

    def _goes_on(self) -> bool:
        """Look once; an error of the look itself is logged, and ends no watch."""
        try:
            return self._look()
        except RuntimeError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the next look may be fine
            _warn(f"a look for hangs failed: {one_line(error)}", once=True)
            return True

    def _pause(self) -> float:
        left = self._after - self._waited(doing.now)
        return min(max(left, _LEAST), self._tick) if left > 0 else self._tick

    def _waited(self, note: Note) -> float:
        """Return for how many seconds this rank has been in one call, or step."""
        call, since, step = note
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
        found = bounded(hang.has_news, self._after)
        if not found:
            where = whereabouts(hang.number, note, frame).text
            _warn(f"{SERVER} does not answer; this rank {where}")
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


def sign(channel: Channel, *, is_here: bool) -> None:
    """Leave for the others which process this is, or that it has left."""
    process = json.dumps([socket.gethostname(), os.getpid()]) if is_here else _LEFT
    if is_here:
        channel.store.set(f"at/{channel.rank}", "")  # else who logs asks for each rank
    channel.store.set(f"process/{channel.rank}", process)


class Hang:
    """The hang of a number, which may be still to come.

    Attributes:
        is_told: whether this rank has said where it is.
        is_one: whether it is a hang, or ranks wait for long work.

    Args:
        channel: the watch's own; after its timeout each rank that runs has looked.
        number: from 1.
    """

    def __init__(self, channel: Channel, number: int) -> None:
        self.number, self.is_told, self.is_one = number, False, False
        self._channel, self._logs = channel, False
        self._store = dist.PrefixStore(str(number), channel.store)

    def has_news(self) -> bool:
        """Return whether a rank has begun it; once it is told, whether it is over."""
        return self._store.check(["over" if self.is_told else "began"])

    def begin(self) -> bool:
        """Begin it; return whether no other rank has."""
        return self._is_first("began")

    def end(self, seconds: float) -> None:
        """Say that it is over, as the rank that has begun it."""
        self._store.set("over", f"{seconds:.0f}")

    def seconds(self) -> int:
        """Return how long it has taken, once it is over; who has told of it logs that."""
        seconds = int(self._store.get("over"))
        if self._logs:
            _warn(f"the run continues after {seconds} s")
        return seconds

    def tell(self, own: Whereabouts) -> None:
        """Say where this rank is, and see to it that one rank logs where all are."""
        channel, tick = self._channel, self._channel.timeout.total_seconds()
        channel.store.set(f"at/{channel.rank}", json.dumps(asdict(own)))
        if self._store.add("came", 1) == channel.size:
            self._store.set("all", "")
        self.is_told = True
        news, grace = ("all", _GRACE) if channel.rank == 0 else ("silent", 2 * _GRACE)
        self._come([news], tick + grace)
        if self._is_first("logs"):  # rank 0, or one that has waited for it in vain
            self._log_all()
        elif self._come(["silent"], 2 * _GRACE):
            self._look_for_silent()

    def _log_all(self) -> None:
        ranks, self._logs = range(self._channel.size), True
        texts = texts_of(self._channel.store, [f"at/{rank}" for rank in ranks])
        said = {rank: Whereabouts.of(json.loads(text)) for rank, text in enumerate(texts) if text}
        found = {rank: one for rank, one in said.items() if one.hang == self.number}
        silent = [rank for rank in ranks if rank not in found]
        head, self.is_one = headline(found, silent)
        self._store.set("silent", json.dumps([silent, self.is_one]))
        lines = [head, *table(found, self._states(silent))]
        if self.is_one:
            file = _written(f"hang-{self.number}.txt", [*lines, *stacks(found, fold=False)])
            several = stacks(found, fold=True)
            lines += several[:_MOST]
            lines += [f"and {len(several) - _MOST} stacks more"] if len(several) > _MOST else []
            lines += [f"the whole stacks are in {file}"] if file else []
            lines += [text] if (text := flight_recorder()) else []
        _warn("\n".join(lines))

    def _states(self, silent: list[int]) -> dict[int, str]:
        """Return what is known of ranks that do not answer."""
        if not silent:
            return {}
        self._look_for_silent()
        keys = [f"seen/{rank}" for rank in silent]
        self._come(keys, _GRACE)
        seen = zip(silent, texts_of(self._store, keys), strict=True)
        return {rank: text or "does not answer, nor does any of its host" for rank, text in seen}

    def _look_for_silent(self) -> None:
        """Say what ranks of this host do that do not answer, and which have left."""
        silent, self.is_one = json.loads(self._store.get("silent"))
        if not silent:
            return
        processes = texts_of(self._channel.store, [f"process/{rank}" for rank in silent])
        for rank, text in zip(silent, processes, strict=True):
            host, pid = json.loads(text or _LEFT)
            if host in ("", socket.gethostname()):
                state = f"does not answer: its process {pid} on {host} {state_of(pid)}"
                self._store.set(f"seen/{rank}", state if host else "has left the group")

    def _is_first(self, key: str) -> bool:
        own = str(self._channel.rank)
        return self._store.compare_set(key, "", own).decode() == own

    def _come(self, keys: list[str], seconds: float) -> bool:
        return came(self._store, keys, timedelta(seconds=seconds))


def _warn(text: str, *, once: bool = False) -> None:
    try:
        _log.warning(text, once=once)
    except Exception:  # noqa: BLE001  # a handler of the user's own may raise anything
        traceback.print_exc()  # as `logging` does


def _written(name: str, lines: list[str]) -> Path | None:
    """Write a file where torchrun looks for errors; return it if there is such a place."""
    if errors := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        file = Path(errors).parent / name
        with suppress(OSError):
            # A path may have bytes that are no text.
            file.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
            return file
    return None
