"""A turn: every rank says something, one decides, and all hear the one verdict.

All turns of a group are one numbered sequence over its store. A rank counts itself in, and leaves
an entry under ``at/{rank}``: in which turn and call it is, and what it says. Then it waits for one
key, the verdict. It makes as many requests at any number of ranks. The first verdict stands. It
comes from the last rank to come, rank 0 that has done its work, a rank whose patience ends, or one
that fails. Nothing here is a collective of the backend: who does not come is named, and the group
is usable afterwards.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

from pardata.store._caller import call_site
from pardata.store._client import PART, Channel, answered, came, taken
from pardata.store._current_op import doing
from pardata.store._remote_error import Failure, as_consequence, follows, text_of
from pardata.store._verdict import KINDS, ORDER, Decide, Verdict, entries_of, give, judge, key_of

Say = Callable[[], object]
Patience = timedelta | None  # None: that of the group


def all_say(channel: Channel, call: str, say: Say, decide: Decide, timeout: Patience = None) -> Any:
    """Return what is decided on what all ranks say. Collective.

    Args:
        channel: the store, and this rank.
        call: its name in errors; ranks in different calls are told.
        say: returns something JSON-like. What it raises is raised here, and told to the others.
        decide: gets what all said, in rank order, on the rank that comes last. What it raises is
            raised on every rank.
        timeout: how long to wait for the others; that of `channel` if not given.

    Raises:
        TimeoutError: names the ranks that did not come, or says that the store does not answer.
        RuntimeError: if ranks are in different calls (says which rank is in which), if one
            has failed (see `call_off`), or if the store is gone.
    """
    refuse_within(call)
    turn = Turn(channel, call, decide)
    try:
        turn.value = say()
        if (length := len(json.dumps(turn.value))) > PART:
            raise ValueError(
                f"what ranks compare in `{call}` must be at most {PART >> 20} MiB, but is "
                f"{length / 2**20:.1f}: pass less, or what is the same on every rank"
            )
    except Exception as error:  # noqa: BLE001  # raised again by `decision`, on every rank
        turn.error, turn.value = error, None
    try:
        return turn.decision(turn.heard(channel.timeout if timeout is None else timeout))
    except Exception as error:
        if turn.error is None or error is turn.error:
            raise
        raise error from turn.error  # it may be why the others did not come
    finally:
        turn.error = None  # held by a frame of its own it would live until a garbage collection


def refuse_within(call: str) -> None:
    """Refuse a call of all ranks if the others wait until this one has done its work."""
    if doing.leads:
        raise RuntimeError(
            f"`{call}` must be reached by every rank, but the others wait until this rank has done "
            f"its `{doing.leads}`: make the call after it, or before"
        )


class Turn:
    """One rank's part in a turn; in a later one, if the others gave it up in the meantime.

    Attributes:
        call: its name in errors.
        decide: makes the decision of what all say; if it is not given, rank 0 gives one.
        value: what this rank says.
        error: what it raised instead.

    Args:
        channel: the store, and this rank.
    """

    def __init__(self, channel: Channel, call: str, decide: Decide | None = None) -> None:
        self._channel, self.call, self.decide = channel, call, decide
        self.value: object = None
        self.error: Exception | None = None
        self._number, self._where, self._late = 0, call_site(), ""

    def heard(self, timeout: timedelta) -> Verdict:
        """Come, and return the verdict once it is there.

        As often as the group's timeout passes, the store must answer.
        """
        before = doing.enter(self.call)
        try:
            return self._verdict(timeout)
        finally:
            doing.leave(before)

    def _verdict(self, timeout: timedelta) -> Verdict:
        left, is_here = timeout, False
        while left:
            patience = min(left, self._channel.timeout)
            left -= patience
            ends = timeout if self.decide and not left else None
            # Both in one request to the store, as each starts a thread.
            listen = partial(self._listened, patience, ends, comes=not is_here)
            verdict, is_here = answered(patience, listen), True
            if verdict is None:
                continue
            if not self._gave_me_up(verdict):
                return verdict
            left, is_here = timeout, False  # those who gave this rank up are in a later turn
            self._late = f"; rank {verdict['rank']} came before, and gave up waiting for this rank"
        cure = "give a larger `timeout` if the work takes that long, else look at rank 0's output"
        raise self._in_vain(TimeoutError, f" within {timeout}, but has not: {cure}")

    def come(self) -> None:
        """Let all know that this rank is here."""
        answered(self._channel.timeout, self._come)

    def tell(self, **verdict: object) -> None:
        """Give the verdict when the work is done; raise another one, if that stands."""
        give_it = partial(self._give, verdict)
        while self._gave_me_up(stands := answered(self._channel.timeout, give_it)):
            self.come()
        if not verdict.items() <= stands.items():  # it is another's
            self.decision(stands)

    def decision(self, verdict: Verdict) -> Any:
        """Return what a verdict decides, or raise what it says instead. Once for each verdict."""
        if "parts" in verdict:
            readers = self._channel.size - (self.decide is None)  # rank 0 does not read its own
            take = partial(taken, self._channel.store, verdict["parts"], readers)
            verdict = json.loads(answered(self._channel.timeout, take))
        if "error" in verdict:
            kind, text = verdict["error"]
            raise KINDS[kind](text)
        if verdict["call"] not in ("", self.call):
            raise RuntimeError(
                f"{ORDER} rank {verdict['rank']} is in {verdict['call']} and rank "
                f"{self._channel.rank} in {self.call}: look for a branch that skips one"
            )
        if "off" in verdict:
            kind = TimeoutError if "missing" in verdict else RuntimeError
            raise self._in_vain(kind, f", but {verdict['off']}")
        if "failed" in verdict:
            failed = [Failure(**told) for told in verdict["failed"]]
            if self.decide is None:
                failed[0].reraise()
            # Who failed because another one did says that, if it is known.
            if self.error is not None and follows(self.error) != failed[0].is_cause:
                raise self.error
            seen = f"(seen on rank {self._channel.rank}, which did nothing wrong)"
            summaries = [failure.summary() for failure in failed]
            raise as_consequence(RuntimeError("\n".join([*summaries, seen])))
        return verdict["decision"]

    def _in_vain(self, kind: type[Exception], news: str) -> Exception:
        """Return the error of a rank that waits for what does not come."""
        of_all = f"`{self.call}` must be reached by every rank"
        must = of_all if self.decide else f"rank 0 must finish its `{self.call}`"
        end = ", timed out" if kind is TimeoutError else ""
        error = kind(f"{must}{news}; this rank waits at {self._where}{self._late}")
        return as_consequence(error, f"{self.call} at {self._where}{end}")

    def _gave_me_up(self, verdict: Verdict) -> bool:
        return self._channel.rank in verdict.get("missing", ())

    def _listened(
        self, patience: timedelta, ends: timedelta | None, *, comes: bool
    ) -> Verdict | None:
        """Return the verdict if it comes in time; give one if all patience ends, if all say."""
        if comes:
            self._come()
        key = key_of(self._number)
        if came(self._channel.store, [key], patience):
            verdict: Verdict = json.loads(self._channel.store.get(key))
            return verdict
        return None if ends is None else self._judge(ends)

    def _come(self) -> None:
        store, rank = self._channel.store, self._channel.rank
        self._number = store.add(f"turn/{rank}", 1)
        entry = {"turn": self._number, "call": self.call, "where": self._where, "failed": None}
        if self.error is not None:  # each raises its own: the others need no more than the text
            text, is_cause = text_of(self.error), not follows(self.error)
            entry["failed"] = asdict(Failure(rank, self.call, text, is_cause=is_cause))
        store.set(f"at/{rank}", json.dumps({**entry, "value": self.value}))
        if store.add(f"came/{self._number}", 1) == self._channel.size:
            # All are here, so all have read the verdict before.
            store.delete_key(f"came/{self._number}")
            store.delete_key(key_of(self._number - 1))
            self._judge(self._channel.timeout)

    def _judge(self, timeout: timedelta) -> Verdict | None:
        """Give a verdict, as the last one to come, or as one whose patience ends.

        Returns the one that stands; None if rank 0 is still to give it.
        """
        entries = entries_of(self._channel.store, self._channel.size)
        verdict = judge(entries, self._number, self.decide, timeout)
        return None if verdict is None else self._give(verdict)

    def _give(self, verdict: Verdict) -> Verdict:
        signed = {"rank": self._channel.rank, "call": self.call, **verdict}
        return give(self._channel.store, self._number, signed)


def call_off(channel: Channel, news: str) -> None:
    """Let all who wait, now or later, for this rank read `news` instead: it comes no more."""
    verdict = {"rank": channel.rank, "call": "", "off": news}
    turn = channel.store.add(f"turn/{channel.rank}", 0) + 1
    # Others may be turns ahead of this rank, if rank 0 decided, or if they gave it up.
    while give(channel.store, turn, verdict)["call"]:  # one that calls off is of none
        turn += 1
