"""A collective that fails says who did not come, who failed first and where this rank waits.

All of it on the way out of an error, so that what succeeds pays nothing: a rank whose collective
failed leaves a note in the group's store and reads what the others left. What comes of it goes with
the error as its `Explanation`, for ``launch/_uncaught`` to report.
"""

import json
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch.distributed as dist

from pardata.ranks._call_site import call_site
from pardata.ranks._failure import as_consequence, is_consequence
from pardata.ranks._store import Channel, Peer, bounded
from pardata.ranks._table import ranks_text, table_of
from pardata.ranks._verdict import missing_cure
from pardata.ranks._world import channel, world

# Seconds to wait for the others' notes. Who is left by a peer hears of it at the same moment as
# the others; those who wait in vain give up as far apart as they came.
_GRACE_LOST, _GRACE_TIMED_OUT = 1.0, 2.0
# Once it is known who failed first, the rest of the table is not worth more than this.
_SETTLE = 0.3
# The store may hang as well, with the process or the network that serves it.
_MARGIN = 1.0
_EXPLANATION = "_pardata_explanation"
_MOST = 64  # notes that are read; the first cause is among the first

# What gloo says, in any version, and NCCL where it raises at all.
_TIMED_OUT = re.compile(r"[Tt]imed out waiting|wait timeout|operation timeout|Socket Timeout")
_LOST = re.compile(
    r"gloo/transport/|Connection (closed|reset) by peer|Application timeout caused pair closure"
)
_LOST_BY_NCCL = re.compile(r"remote|connection|abort|time", re.IGNORECASE)


@dataclass(frozen=True)
class Note:
    """What a rank leaves in the store when it fails.

    Attributes:
        rank: whose it is.
        text: what happened, where, in one line.
        is_cause: whether it failed by itself, and not because another rank was gone.
        place: the collective that it was in, if any.
        seconds: how long it has been there.
        timed_out: whether it waited there in vain.
    """

    rank: int
    text: str
    is_cause: bool = False
    place: str = ""
    seconds: float = 0.0
    timed_out: bool = False


class Notes:
    """What the ranks have left, in the order in which it reached the store: no clock is compared.

    Args:
        line: the group's store.
        peer: this rank.
        own: this rank's note, to be left.
        patience: seconds to wait until every rank has left one.
        settle: seconds to wait once it is known who failed first.

    Attributes:
        there: the notes.
        store_is_gone: whether the store could not be asked to the end.
    """

    def __init__(
        self, line: Channel, peer: Peer, own: Note | None, *, patience: float, settle: float
    ) -> None:
        self._store, self._size = line.store, peer.size
        self._own, self._patience, self._settle = own, patience, settle
        self.there: list[Note] = []
        self.store_is_gone = True
        bounded(patience + _MARGIN, self._ask)

    def first_cause(self, but_of: int) -> Note | None:
        """Return the first note of another rank that failed by itself."""
        causes = (note for note in list(self.there) if note.is_cause and note.rank != but_of)
        return next(causes, None)

    def missing(self) -> list[int]:
        """Return the ranks of which there is no word."""
        heard = {note.rank for note in list(self.there)}
        return [rank for rank in range(self._size) if rank not in heard]

    def _ask(self) -> None:
        if self._own is not None:
            number = self._store.add("trouble/count", 1)
            self._store.set(f"trouble/{number}", json.dumps(asdict(self._own)))
        deadline = time.monotonic() + self._patience
        settled = False
        while not self._all_there() and time.monotonic() < deadline:
            if not settled and any(note.is_cause for note in self.there):
                settled = True
                deadline = min(deadline, time.monotonic() + self._settle)
            time.sleep(0.02)
        self.store_is_gone = False

    def _all_there(self) -> bool:
        count = min(_MOST, self._store.add("trouble/count", 0))
        while len(self.there) < count:
            key = f"trouble/{len(self.there) + 1}"
            if not self._store.check([key]):
                return False  # counted, and being written
            self.there.append(Note(**json.loads(self._store.get(key))))
        return not self.missing()


class explained:  # noqa: N801  # reads as a word: with explained("all_gather")
    """A block whose lost connections and timeouts say which call it was and how the ranks stand.

    Costs a look at the clock where nothing fails.

    Args:
        place: the name of the call.
        batch: if it knows its epoch and step, the error says them.
    """

    __slots__ = ("_batch", "_began", "_place")

    def __init__(self, place: str, batch: object = None) -> None:
        self._place, self._batch = place, batch

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or is_consequence(error) or not is_lost(error):
            return
        better = None
        with suppress(Exception):  # whatever goes wrong here, the first error is not lost
            better = _explained(error, self._place, self._batch, time.monotonic() - self._began)
        if better is not None:
            raise better from error


def is_lost(error: BaseException) -> bool:
    """Return whether a collective of the backend raised `error` because a peer was not there."""
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    pattern = _LOST_BY_NCCL if isinstance(error, dist.DistBackendError) else _LOST
    return pattern.search(str(error)) is not None or _is_timeout(error)


@dataclass(frozen=True)
class Explanation:
    """What is known of an error of `explained`; goes with it where it is pickled.

    Attributes:
        own: the note that this rank has left.
        first: that of the rank that failed first.
        store_is_gone: whether there is nobody to ask any more.
    """

    own: Note
    first: Note | None
    store_is_gone: bool

    @classmethod
    def of(cls, error: BaseException) -> "Explanation | None":
        """Return that of `error`, if it has one."""
        found: Explanation | None = vars(error).get(_EXPLANATION)
        return found


def _explained(
    error: BaseException, place: str, batch: object, seconds: float
) -> RuntimeError | TimeoutError:
    here, where = world(), call_site()
    timed_out = _is_timeout(error)
    epoch, step = getattr(batch, "epoch", None), getattr(batch, "step", None)
    if isinstance(epoch, int) and isinstance(step, int):
        place = f"{place} (epoch {epoch}, step {step})"
    ended = "timed out" if timed_out else "lost a connection"
    own = Note(
        here.rank,
        f"{place} at {where}, {ended} after {seconds:.1f} s",
        place=place,
        seconds=seconds,
        timed_out=timed_out,
    )
    grace = _GRACE_TIMED_OUT if timed_out else _GRACE_LOST
    notes = Notes(channel(), here, own, patience=grace, settle=_SETTLE)
    first = notes.first_cause(here.rank)
    text = (
        f"`{place}` must be reached by every rank, but {_what_is_wrong(notes, first, here.size)}; "
        f"this rank waits at {where}\n{_table(notes, here.size)}\n({first_words(error)})"
    )
    better = TimeoutError(text) if timed_out else RuntimeError(text)
    vars(better)[_EXPLANATION] = Explanation(own, first, notes.store_is_gone)
    return as_consequence(better, own.text)


def _what_is_wrong(notes: Notes, first: Note | None, size: int) -> str:
    if first is not None:
        return f"rank {first.rank} of {size} failed first: {first.text}"
    there, missing = list(notes.there), notes.missing()
    if notes.store_is_gone and len(there) <= 1:
        return (
            "a connection is lost and the group's store with it: the process that serves it (rank "
            "0, or torchrun's agent) has ended or does not answer; look at its output for an "
            "earlier error"
        )
    if missing and there:
        return f"{ranks_text(missing)} of {size} did not come: {missing_cure(missing)}"
    if len({note.place for note in there}) > 1:
        return "the ranks are in different calls: make the same calls in the same order on each"
    return _who_was_late(there, size) or "a connection between them was lost: is the network down?"


def _who_was_late(there: list[Note], size: int) -> str:
    """Name the last of ranks that all came, if some had given up by then."""
    gave_up = sorted({note.rank for note in there if note.timed_out})
    others = [note for note in there if not note.timed_out]
    if not gave_up or not others:
        return ""
    last = min(others, key=lambda note: note.seconds)
    return (
        f"rank {last.rank} of {size} came last, when {ranks_text(gave_up)} had given up: see what "
        f"kept it, or give init a larger `timeout`"
    )


def _table(notes: Notes, size: int) -> str:
    """One line for each set of ranks of which the same is known."""
    known = {note.rank: note.text for note in reversed(notes.there)}
    return table_of([known.get(rank, "no word from it") for rank in range(size)])


def _is_timeout(error: BaseException) -> bool:
    return _TIMED_OUT.search(str(error)) is not None


def first_words(error: BaseException) -> str:
    """Return what torch said, without its advice to look at the other worker."""
    line = str(error).strip().split("\n", 1)[0]
    return line.split(". This is typically")[0][:300]
