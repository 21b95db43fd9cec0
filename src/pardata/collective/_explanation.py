"""A collective that fails says who did not come, who failed first and where this rank waits.

All of it on the way out of an error, so that what succeeds pays nothing: a rank whose collective
failed leaves a note in the group's store and reads what the others left. What comes of it goes with
the error as its `Explanation`, for ``launch/_uncaught`` to report.
"""

import json
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

from pardata.ranks._call_site import call_site
from pardata.ranks._failure import as_consequence, is_consequence
from pardata.ranks._store import Channel, Peer, bounded
from pardata.ranks._table import ranks_text, table_of
from pardata.ranks._verdict import entries_of, missing_cure
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


@dataclass
class Explanation:
    """What is known of an error; goes with that of `explained` where it is pickled.

    Attributes:
        own: the note that this rank has left.
        size: number of ranks.
        there: all notes, in the order in which they reached the store: no clock is compared.
        store_is_gone: whether the store could not be asked to the end.
    """

    own: Note
    size: int
    there: list[Note] = field(default_factory=list)
    store_is_gone: bool = True

    @classmethod
    def of(cls, error: BaseException) -> "Explanation | None":
        """Return that of `error`, if it has one."""
        found: Explanation | None = vars(error).get(_EXPLANATION)
        return found

    @property
    def first(self) -> Note | None:
        """The first note of another rank that failed by itself, if this one did not."""
        others = (note for note in list(self.there) if note.rank != self.own.rank)
        causes = (note for note in others if note.is_cause)
        return None if self.own.is_cause else next(causes, None)

    @property
    def missing(self) -> list[int]:
        """The ranks of which there is no word."""
        heard = {note.rank for note in list(self.there)}
        return [rank for rank in range(self.size) if rank not in heard]


def asked(
    line: Channel, peer: Peer, own: Note, *, patience: float, settle: float, leave: bool = True
) -> Explanation:
    """Leave this rank's note, and return what the others have left.

    Waits so many seconds of `patience` for a note of every rank, and to `settle` once it is known
    who failed first.
    """
    known = Explanation(own, peer.size)

    def ask() -> None:
        if leave:
            number = line.store.add("trouble/count", 1)
            line.store.set(f"trouble/{number}", json.dumps(asdict(own)))
        _listen(line.store, known, patience, settle)
        known.store_is_gone = False

    bounded(patience + _MARGIN, ask)
    return known


def _listen(store: dist.Store, known: Explanation, patience: float, settle: float) -> None:
    deadline = time.monotonic() + patience
    while not _all_there(store, known) and time.monotonic() < deadline:
        if any(note.is_cause for note in known.there):
            deadline = min(deadline, time.monotonic() + settle)
        time.sleep(0.02)
    if patience and known.first is None and known.missing:
        _add_who_waits(store, known)


def _all_there(store: dist.Store, known: Explanation) -> bool:
    count = min(_MOST, store.add("trouble/count", 0))
    while len(known.there) < count:
        key = f"trouble/{len(known.there) + 1}"
        if not store.check([key]):
            return False  # counted, and being written
        known.there.append(Note(**json.loads(store.get(key))))
    return not known.missing


def _add_who_waits(store: dist.Store, known: Explanation) -> None:
    """Say where ranks are that have left no note because their turn is not over."""
    entries = entries_of(store, known.size)
    for rank in known.missing:
        entry = entries[rank]
        if entry is not None and not store.check([entry["key"]]):
            text = f"{entry['call']} at {entry['where']}, not done yet"
            known.there.append(Note(rank, text, place=entry["call"]))


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
    known = asked(channel(), here, own, patience=grace, settle=_SETTLE)
    text = (
        f"`{place}` must be reached by every rank, but {_what_is_wrong(known, own)}; this rank "
        f"waits at {where}\n{_table(known)}\n({first_words(error)})"
    )
    better = TimeoutError(text) if timed_out else RuntimeError(text)
    vars(better)[_EXPLANATION] = known
    return as_consequence(better, own.text)


def _what_is_wrong(known: Explanation, own: Note) -> str:
    first, size, there, missing = known.first, known.size, list(known.there), known.missing
    if first is not None:
        return f"rank {first.rank} of {size} failed first: {first.text}"
    if known.store_is_gone and len(there) <= 1:
        return (
            "a connection is lost and the group's store with it: the process that serves it (rank "
            "0, or torchrun's agent) has ended or does not answer; look at its output for an "
            "earlier error"
        )
    if missing and there:
        # Who waits for this rank learns that a connection is lost when this one ends.
        waits = "" if own.timed_out or len(missing) == 1 else ", or wait for one that did not"
        return f"{ranks_text(missing)} of {size} did not come{waits}: {missing_cure(missing)}"
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


def _table(known: Explanation) -> str:
    texts = {note.rank: note.text for note in reversed(known.there)}
    return table_of([texts.get(rank, "no word from it") for rank in range(known.size)])


def _is_timeout(error: BaseException) -> bool:
    return _TIMED_OUT.search(str(error)) is not None


def first_words(error: BaseException) -> str:
    """Return what torch said, without its advice to look at the other worker."""
    line = str(error).strip().split("\n", 1)[0]
    return line.split(". This is typically")[0][:300]
