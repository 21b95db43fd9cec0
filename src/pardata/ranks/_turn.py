"""A turn: every rank says something, one decides, and all hear the one verdict.

All turns of a group are one numbered sequence over its store. A rank counts itself in, leaves an
entry under ``at/{rank}`` (in which turn and call it is, and what it says), and waits for one key,
the verdict: so many requests at any number of ranks. The first verdict stands, whoever gives it:
the last rank to come, rank 0 that has done its work, a rank whose patience ends, or one that fails.
Nothing here is a collective of the backend: who does not come is named, and the group is usable
afterwards.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from pardata.ranks._call_site import call_site
from pardata.ranks._failure import Failure, as_consequence
from pardata.ranks._store import Channel, Peer, answered, came
from pardata.ranks._verdict import ERRORS, ORDER, Verdict, entries_of, give, judged, told_of


def all_say(
    line: Channel,
    peer: Peer,
    call: str,
    say: Callable[[], object],
    decide: Callable[[list[Any]], object],
    *,
    timeout: timedelta | None = None,
) -> Any:
    """Return what is decided on what all ranks say. Collective.

    Args:
        line: the store.
        peer: this rank.
        call: its name in errors; ranks in different calls are told.
        say: returns something JSON-like. What it raises is raised here, and told to the others.
        decide: gets what all said, in rank order, on the rank that comes last. What it raises is
            raised on every rank.
        timeout: how long to wait for the others; that of `line` if not given.

    Raises:
        TimeoutError: names the ranks that did not come, or says that the store does not answer.
        RuntimeError: where ranks are in different calls (says which rank is in which), where one
            has failed (see `call_off`), and where the store is gone.
    """
    turn = Turn(line, peer, call, decide=decide)
    turn.say(say)
    try:
        return turn.decision(turn.heard(line.timeout if timeout is None else timeout))
    except Exception as error:
        if turn.own is None or error is turn.own:
            raise
        raise error from turn.own  # which may be why the others did not come


class Turn:
    """One rank's part in a turn; in a later one, where the others gave it up in the meantime.

    Args:
        line: the store.
        peer: this rank.
        call: its name in errors.
        decide: makes the decision of what all say; where it is not given, rank 0 gives one.
        node: where the first rank of each node gives one: which node this is, of how many ranks.

    Attributes:
        own: what this rank raised instead of saying something.
    """

    def __init__(
        self,
        line: Channel,
        peer: Peer,
        call: str,
        *,
        decide: Callable[[list[Any]], object] | None = None,
        node: tuple[int, int] | None = None,
    ) -> None:
        self.own: Exception | None = None
        self._line, self._store, self._peer, self._call = line, line.store, peer, call
        self._decide, self._node = decide, node
        self._where = call_site()
        self._number = 0
        self._said: tuple[str, object] = "", None

    def say(self, say: Callable[[], object]) -> None:
        """Take what `say` returns for this rank's word, or that it raises."""
        try:
            self._said = "", say()
            json.dumps(self._said)
        except Exception as error:  # noqa: BLE001  # raised again by `decision`, on every rank
            self.own = error
            failure = Failure.of(error, rank=self._peer.rank, place=self._call)
            self._said = failure.summary(), None

    def heard(self, timeout: timedelta) -> Verdict:
        """Come, and return the verdict once it is there.

        As often as the group's timeout passes, the store must answer.
        """
        left, comes = timeout, True
        while left > timedelta(0):
            patience = min(left, self._line.timeout)
            left -= patience
            ends = None if left else timeout
            verdict = answered(patience, partial(self._listened, patience, comes=comes, ends=ends))
            if verdict is not None and not self._gave_me_up(verdict):
                return verdict
            comes = verdict is not None
            if comes:
                left = timeout  # those who gave this rank up are in a later turn
        msg = (
            f"{self._must} within {timeout}, but has not: give `timeout=` a larger value if the "
            f"work takes that long, else look at rank 0's output; this rank waits at {self._where}"
        )
        raise as_consequence(TimeoutError(msg), f"{self._call} at {self._where}, timed out")

    def lead(self) -> None:
        """Come as the one that gives the verdict when its work is done."""
        answered(self._line.timeout, self._come)

    def tell(self, **verdict: object) -> None:
        """Give the verdict; raise another one, if that stands."""
        own = {**self._giver, **verdict}
        while self._gave_me_up(stands := answered(self._line.timeout, lambda: self._told(own))):
            self.lead()
        if stands != own:
            self.decision(stands)

    def decision(self, verdict: Verdict) -> Any:
        """Return what a verdict decides, or raise what it says instead."""
        error = self._error(verdict)
        if error is not None:
            raise error
        if "failure" in verdict:
            Failure(**verdict["failure"]).reraise()
        return verdict["decision"]

    @property
    def _giver(self) -> Verdict:
        return {"rank": self._peer.rank, "call": self._call}

    @property
    def _key(self) -> str:
        return _key(self._number, self._node and self._node[0])

    @property
    def _must(self) -> str:
        if self._decide is None:
            return f"rank 0 must finish its `{self._call}`"
        return f"`{self._call}` must be reached by every rank"

    def _gave_me_up(self, verdict: Verdict) -> bool:
        return self._peer.rank in verdict.get("missing", ())

    def _listened(
        self, patience: timedelta, *, comes: bool, ends: timedelta | None
    ) -> Verdict | None:
        """Return the verdict if it comes in time; give one where all patience ends, if all say."""
        if comes:
            self._come()
            if self._node is not None and (stands := self._elsewhere()) is not None:
                return stands
        if not came(self._store, self._key, patience):
            if ends is None or self._decide is None:
                return None
            self._judge(ends)
        verdict: Verdict = json.loads(self._store.get(self._key))
        self._read()
        return verdict

    def _come(self) -> None:
        """Let all know that this rank is here."""
        store, rank = self._store, self._peer.rank
        self._number = store.add(f"turn/{rank}", 1)
        said = json.dumps([self._call, self._where, self._key, *self._said])
        store.set(f"at/{rank}", f"{self._number} {said}")
        if store.add(f"came/{self._number}", 1) == self._peer.size:
            # All are here, so all have read the verdict before.
            store.delete_key(f"came/{self._number}")
            store.delete_key(_key(self._number - 1))
            self._judge(self._line.timeout)

    def _elsewhere(self) -> Verdict | None:
        """Return a verdict for all: who waits for the first of its node may be late, or astray."""
        key = _key(self._number)
        verdict: Verdict | None = (
            json.loads(self._store.get(key)) if self._store.check([key]) else None
        )
        return None if verdict is None or self._passes(verdict) else verdict

    def _passes(self, verdict: Verdict) -> bool:
        """Return whether a verdict for all is that of a call as this, which is each node's own."""
        return verdict["call"] == self._call and "decision" in verdict

    def _told(self, own: Verdict) -> Verdict:
        """Give the verdict of who leads; return the one that stands."""
        if self._node is None:
            return give(self._store, self._key, own)
        stands = give(self._store, _key(self._number), {**self._giver, "decision": None})
        stands = give(self._store, self._key, own if self._passes(stands) else stands)
        self._read()
        return stands

    def _read(self) -> None:
        """Count who has read the verdict of a node: the last one removes it."""
        if self._node is not None:
            readers = f"{self._key}/read"
            if self._store.add(readers, 1) == self._node[1]:
                self._store.delete_key(self._key)
                self._store.delete_key(readers)

    def _judge(self, timeout: timedelta) -> None:
        """Give the verdict, as the last one to come, or as one whose patience ends."""
        entries = entries_of(self._store, self._peer.size)
        verdict = judged(entries, self._number, self._call, self._decide, timeout)
        if verdict is not None:
            # One key, but where the ranks of a node wait for the first one there.
            keys = {entry.key for entry in entries if entry and entry.turn == self._number}
            for key in sorted(keys | {self._key}):
                give(self._store, key, {**self._giver, **verdict})

    def _error(self, verdict: Verdict) -> Exception | None:
        """Return what this rank raises for a verdict that is no decision."""
        waits = f"; this rank waits at {self._where}"
        at = f"{self._call} at {self._where}"
        if "off" in verdict:
            return as_consequence(RuntimeError(f"{self._must}, but {verdict['off']}{waits}"), at)
        if "error" in verdict:
            kind, text = verdict["error"]
            return ERRORS[kind](text)
        if verdict["call"] != self._call:
            return RuntimeError(
                f"{ORDER} rank {verdict['rank']} is in {verdict['call']} and rank "
                f"{self._peer.rank} in {self._call}: look for a branch that skips one"
            )
        if "missing" in verdict:
            return as_consequence(TimeoutError(f"{verdict['text']}{waits}"), f"{at}, timed out")
        if "failed" in verdict:
            return self.own or told_of(verdict["failed"], self._peer.rank)
        return None


def _key(turn: int, node: int | None = None) -> str:
    return f"verdict/{turn}" if node is None else f"verdict/{turn}/node{node}"


def call_off(line: Channel, peer: Peer, news: str, *, node: int | None = None) -> None:
    """Let all who wait, now or later, for this rank read `news` instead.

    Args:
        line: the store.
        peer: this rank, which will come to no turn any more.
        news: says why.
        node: which one, if this is its first rank, for which the others of the node wait.
    """
    verdict = {"rank": peer.rank, "call": "", "off": news}
    turn = line.store.add(f"turn/{peer.rank}", 0)
    is_off = False
    while not is_off:
        # Others may be turns ahead of this rank, where rank 0 decided, or where they gave it up.
        turn += 1
        stands = [give(line.store, _key(turn, which), verdict) for which in {None, node}]
        is_off = all("off" in each for each in stands)
