"""A round: all ranks contribute a value over the store, and all get one result or one error.

The rounds of a group are numbered, and every rank makes the same ones in the same order. In each
a rank writes its contribution, counts itself in, and waits for one key, the result. The first
result stands. In `exchange` the last rank to arrive writes it; in `lead` rank 0 does, or the first
rank of a node, which works for the others. A rank that waits in vain writes who is missing, and one
that leaves the group writes why: no round can follow then. No request grows with the number of
ranks, except for the one that reads all contributions.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from pardata.store._caller import call_site
from pardata.store._client import StoreClient, set_once, texts_of, wait_for
from pardata.store._current_op import current_op
from pardata.store._rank_format import format_rank_table, format_ranks
from pardata.store._remote_error import RemoteError, is_secondary, mark_secondary, type_and_message

Decide: TypeAlias = Callable[[list[Any]], object]  # gets the values of all ranks, in rank order
Publish: TypeAlias = Callable[[object], None]

_RAISABLE = {error.__name__: error for error in (RuntimeError, ValueError, TypeError)}
_SAME_CALLS = "every rank must make the same calls in the same order, but"
_LEFT = "-1"  # in place of the number of parts of a result: its rank has left the group
_MOST = 2**22  # characters of a value: a TCPStore closes a connection that sends over 8 MiB


def exchange(
    client: StoreClient,
    call: str,
    contribute: Callable[[], object],
    decide: Decide,
    timeout: timedelta | None = None,
) -> Any:
    """Return what `decide` makes of the values that `contribute` returns on all ranks. Collective.

    Args:
        client: of the store.
        call: the name of the call in errors.
        contribute: returns a value that fits in JSON. An exception in it is raised on this rank,
            and in a text on the others.
        decide: runs on the rank that arrives last. An exception in it is raised on every rank.
        timeout: for how long to wait for the other ranks; that of `client` if not given.

    Raises:
        TimeoutError: ranks did not come, or the store does not answer. The error names them.
        RuntimeError: ranks are in different calls, one has left the group, or the store has ended.
    """
    forbid_in_rank_zero_section(call)
    this = Round(client, call, decide=decide)
    value, error = None, None
    try:
        value = contribute()
        if (length := len(json.dumps(value))) > _MOST:
            raise ValueError(
                f"what ranks compare in `{call}` must be at most {_MOST >> 20} MiB, but is "
                f"{length / 2**20:.1f}: pass less, or what is the same on every rank"
            )
    except Exception as raised:  # noqa: BLE001  # raised again once the other ranks know
        value, error = None, raised
    try:
        result = this.wait(timeout or client.timeout, value, error)
        return this.value_of(result, error)
    except Exception as raised:
        if error is None or raised is error:
            raise
        raise raised from error  # it may be why other ranks did not come
    finally:
        error = None  # held by this frame it would live until a garbage collection


@contextmanager
def lead(client: StoreClient, call: str, others: timedelta | None = None) -> Iterator[Publish]:
    """Work for the ranks that `follow`, or `exchange`; yield a function that sends them a result.

    An exception in the block is raised on every rank.

    Args:
        client: of the store.
        call: the name of the call in errors.
        others: for how long to wait after the block for other ranks that lead, too.
    """
    this = Round(client, call, decide=None if others is None else _nothing)
    if others is None:
        client.request(lambda store: this.arrive(store, None, None))
    before, current_op.leads = current_op.leads, call.partition("(")[0]
    try:
        yield lambda value: this.publish({"value": value})
    except BaseException as error:
        remote = RemoteError.of(error, rank=client.rank, call=current_op.leads)
        with suppress(Exception):  # the first error says more
            this.publish({"errors": [asdict(remote)]})
        raise
    finally:
        current_op.leads = before
    if others is not None:
        this.value_of(this.wait(others))


def follow(client: StoreClient, call: str, timeout: timedelta) -> Any:
    """Return the result of the rank that leads; raise the exception that it raised."""
    this = Round(client, call)
    return this.value_of(this.wait(timeout))


def _nothing(_values: list[Any]) -> None:
    """Decide on nothing: it matters only that all ranks are here."""


def forbid_in_rank_zero_section(call: str) -> None:
    """Raise if this rank works for the others, which wait for it and cannot make `call`."""
    if current_op.leads:
        raise RuntimeError(
            f"`{call}` must be reached by every rank, but the others wait until this rank has done "
            f"its `{current_op.leads}`: make the call after it, or before"
        )


def abort_rounds(client: StoreClient, text: str) -> None:
    """Let each rank that waits for this one, now or later, raise an error with `text`.

    The other ranks may be some rounds ahead, which rank 0 led; they wait in the first round that
    has no result.
    """
    result = json.dumps({"rank": client.rank, "call": "", "left": text})
    head = f"{client.rank} {_LEFT} {result}"

    def abort(store: dist.Store) -> None:
        number = client.rounds + 1
        # One is enough, whichever rank wrote it.
        while set_once(store, f"{number}/result", head).split(" ", 2)[1] != _LEFT:
            number += 1

    client.closed = client.closed or text
    client.request(abort)


class Round:
    """One rank's part in a round.

    Args:
        client: of the store.
        call: the name of the call in errors.
        decide: makes the result on the rank that arrives last; None if rank 0 leads.
    """

    def __init__(self, client: StoreClient, call: str, *, decide: Decide | None = None) -> None:
        if client.closed:
            raise mark_secondary(
                RuntimeError(
                    f"`{call}` must be reached by every rank, but an earlier call has failed, and "
                    f"no other can follow in this group: {client.closed}"
                )
            )
        client.rounds += 1
        self._client, self._call, self._decide = client, call, decide
        self._number, self._where = client.rounds, call_site()
        self._key = f"{self._number}/result"

    def wait(
        self, timeout: timedelta, value: object = None, error: Exception | None = None
    ) -> dict[str, Any]:
        """Contribute `value` or `error`, and return the result once it is there.

        As often as the group's timeout passes, the store must answer.
        """
        left, is_here = timeout, False

        def listen(store: dist.Store) -> dict[str, Any] | None:
            if not is_here:
                self.arrive(store, value, error)
            return self._read(store) if wait_for(store, [self._key], patience) else None

        before = current_op.push(self._call)
        try:
            while left:
                patience = min(left, self._client.timeout)
                if (result := self._client.request(listen, patience)) is not None:
                    return result
                left, is_here = left - patience, True
            return self._client.request(
                lambda store: self._give(store, self._missing(store, timeout))
            )
        finally:
            current_op.pop(before)

    def arrive(self, store: dist.Store, value: object, error: Exception | None) -> None:
        """Write this rank's contribution, and the result if it is the last one to arrive."""
        client, failed = self._client, None
        if error is not None:  # the others get its text, and raise a RuntimeError
            text, secondary = type_and_message(error), is_secondary(error)
            failed = asdict(RemoteError(client.rank, self._call, text, is_secondary=secondary))
        entry = [self._number, self._call, self._where, value, failed]
        store.set(f"at/{client.rank}", json.dumps(entry))
        count = f"{self._number}/count"
        if store.add(count, 1) == client.size:
            store.delete_key(count)
            for key in client.last_result:  # all are in this round, so all have read it
                store.delete_key(key)
            if (result := self._result(_entries(store, client.size))) is not None:
                self._give(store, result)

    def publish(self, result: dict[str, Any]) -> None:
        """Write the result of the rank that leads; raise another one, if that stands."""
        stands = self._client.request(lambda store: self._give(store, result))
        if stands is not result:
            self.value_of(stands)

    def value_of(self, result: dict[str, Any], error: Exception | None = None) -> Any:
        """Return the value of a result, or raise what it has instead.

        Args:
            result: of this round.
            error: what this rank contributed.
        """
        client = self._client
        if "raises" in result:
            kind, text = result["raises"]
            raise _RAISABLE[kind](text)
        if result["call"] not in ("", self._call):
            raise RuntimeError(
                f"{_SAME_CALLS} rank {result['rank']} is in {result['call']} and rank "
                f"{client.rank} in {self._call}: look for a branch that skips one"
            )
        if "left" in result:
            raise self._closed(RuntimeError, result["left"])
        if "missing" in result:
            raise self._closed(TimeoutError, self._timeout_text(result))
        if "errors" in result:
            errors = [RemoteError(**one) for one in result["errors"]]
            if errors[0].traceback:  # of a rank that led
                errors[0].reraise()
            # An error that another rank's caused gives way to it, if that is known.
            if error is not None and is_secondary(error) == errors[0].is_secondary:
                raise error
            seen = f"(seen on rank {client.rank}, which did nothing wrong)"
            raise mark_secondary(RuntimeError("\n".join([*(e.summary for e in errors), seen])))
        return result["value"]

    def _closed(self, kind: type[Exception], text: str) -> Exception:
        self._client.closed = text
        must = f"`{self._call}` must be reached by every rank"
        return mark_secondary(kind(f"{must}, but {text}; this rank waits at {self._where}"))

    def _timeout_text(self, result: dict[str, Any]) -> str:
        missing, within = result["missing"], result["within"]
        if self._client.rank in missing:
            return f"this rank came when rank {result['rank']} had waited for {within}"
        if self._decide is None:
            return (
                f"rank 0 has not finished within {within}: give a larger `timeout` if the work "
                f"takes that long, else look at its output"
            )
        return missing_ranks_text(missing, self._client.size, f" within {within}")

    def _missing(self, store: dist.Store, timeout: timedelta) -> dict[str, Any]:
        entries = enumerate(_entries(store, self._client.size))
        late = [rank for rank, entry in entries if entry is None or entry[0] < self._number]
        return {"missing": late, "within": str(timeout)}

    def _result(self, entries: Sequence[Any]) -> dict[str, Any] | None:
        """Return the result of the contributions of all ranks; None if rank 0 will give it."""
        later = [entry[0] > self._number for entry in entries]
        calls = [
            e[1] + ", which comes later" * is_later
            for e, is_later in zip(entries, later, strict=True)
        ]
        here = {call for call, is_later in zip(calls, later, strict=True) if not is_later}
        # Only a rank that leads may be in a later round, or one whose wait was interrupted.
        if len(here) > 1 or (self._decide and any(later)):
            return {"raises": ["RuntimeError", f"{_SAME_CALLS} here:\n{format_rank_table(calls)}"]}
        if self._decide is None:
            return None
        if failed := [entry[4] for entry in entries if entry[4]]:
            return {"errors": sorted(failed, key=lambda error: error["is_secondary"])}
        try:
            return {"value": self._decide([entry[3] for entry in entries])}
        except Exception as error:  # noqa: BLE001  # raised on every rank
            kind, text = type(error).__name__, str(error)
            raises = [kind, text] if kind in _RAISABLE else ["RuntimeError", f"{kind}: {text}"]
            return {"raises": raises}

    def _give(self, store: dist.Store, result: dict[str, Any]) -> dict[str, Any]:
        """Write a result, in parts if it is long, if none stands; return the one that stands."""
        rank = self._client.rank
        text = json.dumps({"rank": rank, "call": self._call, **result})
        first, *more = [text[start : start + _MOST] for start in range(0, len(text), _MOST)]
        keys = [f"{self._key}/{rank}/{number}" for number in range(len(more))]
        for key, part in zip(keys, more, strict=True):
            store.set(key, part)
        head = f"{rank} {len(more)} {first}"
        if set_once(store, self._key, head) != head:
            return self._read(store)
        self._client.last_result = [self._key, *keys]
        return result

    def _read(self, store: dist.Store) -> dict[str, Any]:
        rank, count, first = store.get(self._key).decode().split(" ", 2)
        keys = [f"{self._key}/{rank}/{number}" for number in range(int(count))]
        self._client.last_result = [self._key, *keys]
        result: dict[str, Any] = json.loads(
            first + "".join(store.get(key).decode() for key in keys)
        )
        return result


def _entries(store: dist.Store, size: int) -> list[Any]:
    """Return the last contribution of each rank, None for a rank that was in no round yet."""
    texts = texts_of(store, [f"at/{rank}" for rank in range(size)])
    return [None if text is None else json.loads(text) for text in texts]


def missing_ranks_text(missing: list[int], size: int, when: str) -> str:
    """Name ranks that did not come, and say where to look."""
    ranks = format_ranks(missing)
    return (
        f"{ranks} of {size} did not come{when}: look at the output of {ranks} for an earlier "
        f"error, or for a branch that skips this call"
    )
