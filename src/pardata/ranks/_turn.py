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
from dataclasses import dataclass
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
    finally:
        turn.own = None  # held by a frame of its own it would live until a garbage collection


@dataclass
class Turn:
    """One rank's part in a turn; in a later one, where the others gave it up in the meantime.

    Attributes:
        line: the store.
        peer: this rank.
        call: its name in errors.
        decide: makes the decision of what all say; where it is not given, rank 0 gives one.
        node: where the first rank of each node gives one: which node this is, of how many ranks.
        own: what this rank raised instead of saying something.
    """

    line: Channel
    peer: Peer
    call: str
    decide: Callable[[list[Any]], object] | None = None
    node: tuple[int, int] | None = None
    own: Exception | None = None
    _number: int = 0
    _failed: str = ""
    _value: object = None
    _where: str = ""

    def say(self, say: Callable[[], object]) -> None:
        """Take what `say` returns for this rank's word, or that it raises."""
        try:
            self._value = say()
            json.dumps(self._value)
        except Exception as error:  # noqa: BLE001  # raised again by `decision`, on every rank
            failure = Failure.of(error, rank=self.peer.rank, place=self.call)
            self.own, self._failed, self._value = error, failure.summary(), None

    def heard(self, timeout: timedelta) -> Verdict:
        """Come, and return the verdict once it is there.

        As often as the group's timeout passes, the store must answer.
        """
        self._where = call_site()
        left, comes = timeout, True
        while left > timedelta(0):
            patience = min(left, self.line.timeout)
            left -= patience
            ends = None if left else timeout
            verdict = answered(patience, partial(self._listened, patience, comes=comes, ends=ends))
            if verdict is not None and not self._gave_me_up(verdict):
                return verdict
            comes = verdict is not None
            if comes:
                left = timeout  # those who gave this rank up are in a later turn
        raise as_consequence(
            TimeoutError(
                f"{self._must} within {timeout}, but has not: give `timeout=` a larger value if "
                f"the work takes that long, else look at rank 0's output; this rank waits at "
                f"{self._where}"
            ),
            f"{self.call} at {self._where}, timed out",
        )

    def lead(self) -> None:
        """Come as the one that gives the verdict when its work is done."""
        self._where = call_site()
        answered(self.line.timeout, self._come)

    def tell(self, **verdict: object) -> None:
        """Give the verdict; raise another one, if that stands."""
        own = {**self._giver, **verdict}
        while self._gave_me_up(stands := answered(self.line.timeout, lambda: self._told(own))):
            self.lead()
        if stands != own:
            self.decision(stands)

    def decision(self, verdict: Verdict) -> Any:
        """Return what a verdict decides, or raise what it says instead."""
        error = self._error(verdict)
        if error is not None:
            try:
                raise error
            finally:
                del error  # see `all_say`
        if "failure" in verdict:
            Failure(**verdict["failure"]).reraise()
        return verdict["decision"]

    @property
    def _giver(self) -> Verdict:
        return {"rank": self.peer.rank, "call": self.call}

    @property
    def _key(self) -> str:
        return _key(self._number, self.node and self.node[0])

    @property
    def _must(self) -> str:
        if self.decide is None:
            return f"rank 0 must finish its `{self.call}`"
        return f"`{self.call}` must be reached by every rank"

    def _gave_me_up(self, verdict: Verdict) -> bool:
        return self.peer.rank in verdict.get("missing", ())

    def _listened(
        self, patience: timedelta, *, comes: bool, ends: timedelta | None
    ) -> Verdict | None:
        """Return the verdict if it comes in time; give one where all patience ends, if all say."""
        if comes:
            self._come()
            if self.node is not None and (stands := self._elsewhere()) is not None:
                return stands
        if not came(self.line.store, self._key, patience):
            if ends is None or self.decide is None:
                return None
            self._judge(ends)
        verdict: Verdict = json.loads(self.line.store.get(self._key))
        self._read()
        return verdict

    def _come(self) -> None:
        """Let all know that this rank is here."""
        store, rank = self.line.store, self.peer.rank
        self._number = store.add(f"turn/{rank}", 1)
        entry = {"turn": self._number, "call": self.call, "where": self._where, "key": self._key}
        said = {"failed": self._failed, "value": self._value}
        store.set(f"at/{rank}", json.dumps(entry | said))
        if store.add(f"came/{self._number}", 1) == self.peer.size:
            # All are here, so all have read the verdict before.
            store.delete_key(f"came/{self._number}")
            store.delete_key(_key(self._number - 1))
            self._judge(self.line.timeout)

    def _elsewhere(self) -> Verdict | None:
        """Return a verdict for all: who waits for the first of its node may be late, or astray."""
        store, key = self.line.store, _key(self._number)
        verdict: Verdict | None = json.loads(store.get(key)) if store.check([key]) else None
        return None if verdict is None or self._passes(verdict) else verdict

    def _passes(self, verdict: Verdict) -> bool:
        """Return whether a verdict for all is that of a call as this, which is each node's own."""
        return verdict["call"] == self.call and "decision" in verdict

    def _told(self, own: Verdict) -> Verdict:
        """Give the verdict of who leads; return the one that stands."""
        if self.node is None:
            return give(self.line.store, self._key, own)
        stands = give(self.line.store, _key(self._number), {**self._giver, "decision": None})
        stands = give(self.line.store, self._key, own if self._passes(stands) else stands)
        self._read()
        return stands

    def _read(self) -> None:
        """Count who has read the verdict of a node: the last one removes it."""
        if self.node is not None:
            readers = f"{self._key}/read"
            if self.line.store.add(readers, 1) == self.node[1]:
                self.line.store.delete_key(self._key)
                self.line.store.delete_key(readers)

    def _judge(self, timeout: timedelta) -> None:
        """Give the verdict, as the last one to come, or as one whose patience ends."""
        entries = entries_of(self.line.store, self.peer.size)
        verdict = judged(entries, self._number, self.call, self.decide, timeout)
        if verdict is not None:
            # One key, but where the ranks of a node wait for the first one there.
            keys = {entry["key"] for entry in entries if entry and entry["turn"] == self._number}
            for key in sorted(keys | {self._key}):
                give(self.line.store, key, {**self._giver, **verdict})

    def _error(self, verdict: Verdict) -> Exception | None:
        """Return what this rank raises for a verdict that is no decision."""
        waits = f"; this rank waits at {self._where}"
        at = f"{self.call} at {self._where}"
        if "off" in verdict:
            return as_consequence(RuntimeError(f"{self._must}, but {verdict['off']}{waits}"), at)
        if "error" in verdict:
            kind, text = verdict["error"]
            return ERRORS[kind](text)
        if verdict["call"] != self.call:
            return RuntimeError(
                f"{ORDER} rank {verdict['rank']} is in {verdict['call']} and rank "
                f"{self.peer.rank} in {self.call}: look for a branch that skips one"
            )
        if "missing" in verdict:
            return as_consequence(TimeoutError(f"{verdict['text']}{waits}"), f"{at}, timed out")
        if "failed" in verdict:
            return self.own or told_of(verdict["failed"], self.peer.rank)
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
