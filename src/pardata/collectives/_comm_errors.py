"""A collective that fails says who did not come, who failed first and where this rank waits.

All of this runs on the way out of an error, so that what succeeds pays nothing. A rank whose
collective failed leaves its `Failure` in the group's store and reads what the others left. The
error takes the result along as its `Explanation`, which ``process_group/_shutdown`` reports.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

from pardata.environment._world import channel
from pardata.store._caller import call_site
from pardata.store._client import SERVER, Channel, append, bounded
from pardata.store._current_op import doing
from pardata.store._rank_format import ranks_text, table_of
from pardata.store._remote_error import Failure, as_consequence, is_lost, is_timeout, one_line
from pardata.store._round import refuse_within
from pardata.store._verdict import entries_of, key_of, who_did_not_come

# Seconds to wait for the others. Who is left by a peer hears of it at the same moment as they do;
# those who wait in vain give up as far apart as they came.
_GRACE_LOST, _GRACE_TIMED_OUT = 1.0, 2.0
# Once it is known who failed first, the rest of the table is not worth more than this.
_SETTLE = 0.3
_MOST = 64  # that are left, in addition to causes: the first one is among the first


@dataclass
class Explanation:
    """What is known of an error; goes with that of `explained` if that is pickled.

    Attributes:
        own: what this rank has left.
        size: number of ranks.
        failures: what all have left, as it reached the store, because clocks differ.
        store_is_gone: whether the store could not be asked to the end.
    """

    own: Failure
    size: int
    failures: list[Failure] = field(default_factory=list)
    store_is_gone: bool = True

    @property
    def first(self) -> Failure | None:
        """The first of another rank that failed by itself, if this one did not."""
        others = (one for one in self.failures if one.is_cause and one.rank != self.own.rank)
        return None if self.own.is_cause else next(others, None)

    @property
    def missing(self) -> list[int]:
        """The ranks of which there is no word."""
        heard = {one.rank for one in self.failures}
        return [rank for rank in range(self.size) if rank not in heard]


def asked(
    group: Channel, own: Failure, *, patience: float, settle: float, leave: bool = True
) -> Explanation:
    """Leave this rank's failure, and return what the others have left.

    Waits so many seconds of `patience` for a word of every rank, and to `settle` once it is known
    who failed first.
    """
    known = Explanation(own, group.size)

    def ask() -> None:
        if leave and (group.store.add("failed", 1) <= _MOST or own.is_cause):
            append(group.store, "failures", json.dumps(asdict(own)))
        _listen(group.store, known, patience, settle)
        known.store_is_gone = False

    bounded(ask, patience)
    return known


def _listen(store: dist.Store, known: Explanation, patience: float, settle: float) -> None:
    deadline, pause = time.monotonic() + patience, 0.02
    while True:
        lines = store.get("failures").splitlines()
        known.failures = [Failure(**json.loads(line)) for line in lines]
        if any(one.is_cause for one in known.failures):
            deadline = min(deadline, time.monotonic() + settle)
        if not known.missing or time.monotonic() >= deadline:
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.2)  # all ranks may be asking
    if patience and known.first is None and known.missing:
        _add_who_waits(store, known)


def _add_who_waits(store: dist.Store, known: Explanation) -> None:
    """Say where ranks are that have left nothing because their turn is not over."""
    entries = entries_of(store, known.size)
    waiting = {rank: entry for rank in known.missing if (entry := entries[rank]) is not None}
    turns = {entry["turn"] for entry in waiting.values()}
    undecided = {turn for turn in turns if not store.check([key_of(turn)])}
    for rank, entry in waiting.items():
        if entry["turn"] in undecided:
            text = f"{entry['call']} at {entry['where']}, not done yet"
            known.failures.append(Failure(rank, entry["call"], text, is_cause=False))


class explained:  # noqa: N801  # reads as a word: with explained("all_gather")
    """A block whose lost connections and timeouts say which call it was and how the ranks stand.

    Costs a look at the clock, and two notes for who looks for hangs, if nothing fails.

    Args:
        call: the name of the call.
        batch: if it knows its epoch and step, the error says them.
    """

    __slots__ = ("_batch", "_before", "_began", "_call")

    def __init__(self, call: str, batch: object = None) -> None:
        self._call, self._batch = call, batch

    def __enter__(self) -> None:
        refuse_within(self._call)
        self._before = doing.enter(self._call)
        self._began = time.monotonic()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        doing.leave(self._before)
        if error is None or not is_lost(error):
            return
        better = None
        with suppress(Exception):  # whatever goes wrong here, the first error is not lost
            better = self._explained(error)
        if better is not None:
            raise better from error

    def _explained(self, error: BaseException) -> RuntimeError | TimeoutError:
        seconds, call, batch = time.monotonic() - self._began, self._call, self._batch
        group, where = channel(), call_site()
        timed_out = is_timeout(error)
        epoch, step = getattr(batch, "epoch", None), getattr(batch, "step", None)
        if isinstance(epoch, int) and isinstance(step, int):
            call = f"{call} (epoch {epoch}, step {step})"
        ended = "timed out" if timed_out else "lost a connection"
        short = f"{call} at {where}, {ended} after {seconds:.1f} s"
        own = Failure(group.rank, call, short, is_cause=False, seconds=seconds, timed_out=timed_out)
        grace = _GRACE_TIMED_OUT if timed_out else _GRACE_LOST
        known = asked(group, own, patience=grace, settle=_SETTLE)
        texts = {one.rank: one.text for one in reversed(known.failures)}
        table = table_of([texts.get(rank, "no word from it") for rank in range(group.size)])
        text = (
            f"`{call}` must be reached by every rank, but {what_is_wrong(known)}; this rank "
            f"waits at {where}\n{table}\n({one_line(error)[:300]})"
        )
        return as_consequence((TimeoutError if timed_out else RuntimeError)(text), own.text, known)


def what_is_wrong(known: Explanation) -> str:
    """Say whose fault it is: never that of a rank which only waits, if one is known to fail."""
    size, failures, missing = known.size, known.failures, known.missing
    cause = known.own if known.own.is_cause else known.first
    if cause is not None:
        return f"rank {cause.rank} of {size} {cause.fault}"
    if known.store_is_gone and len(failures) <= 1:
        return f"a connection is lost: {SERVER} has ended or does not answer; look at its output"
    if missing and failures:
        # Who only waits for this rank learns of it when this one ends, or came later than it.
        waits = ", or wait for one that did not" if len(missing) > 1 else ""
        return who_did_not_come(missing, size, waits)
    if len({one.call for one in failures}) > 1:
        cure = "make the same calls in the same order on each"
        # Its text, as one that has failed by itself is in no place.
        if any(one.text.startswith("Checkpointer.save at ") for one in failures):
            cure = "call `save` on every rank at the same step, not under `if world.is_main`"
        return f"the ranks are in different calls: {cure}"
    if all(one.timed_out for one in failures):
        return (
            "they wait for different things in it: give the call the same arguments (`count`), and "
            "the model the same mode and frozen parameters, on every rank; or the network is down"
        )
    return (
        _who_was_late(failures, size) or "a connection between them was lost: is the network down?"
    )


def _who_was_late(failures: list[Failure], size: int) -> str:
    """Name the last of ranks that all came, if some had given up by then."""
    gave_up = sorted({one.rank for one in failures if one.timed_out})
    others = [one for one in failures if not one.timed_out]
    if not gave_up or not others:
        return ""
    last = min(others, key=lambda one: one.seconds)
    return (
        f"rank {last.rank} of {size} came last, when {ranks_text(gave_up)} had given up: see what "
        f"kept it, or give init a larger `timeout`"
    )
