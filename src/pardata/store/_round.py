"""A round: all ranks contribute a value over the store, and all get one result or one error.

The rounds of a group are numbered, and every rank takes part in all of them, in the same order. A
rank writes its contribution, increments a counter, and waits for the key of the result. Only the
first result is stored. The last rank to arrive writes it, or a rank that fails in its `lead`
section. After a timeout a rank writes the missing ranks, and a rank that leaves the group writes
the reason. No round follows such a result. Only the request that reads all contributions grows with
the number of ranks.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias

import torch.distributed as dist

from pardata.store._client import StoreClient, multi_get_or_none, set_once, wait_for
from pardata.store._current_op import call_site, check_allowed, current_op, forbidding_calls
from pardata.store._rank_errors import (
    RemoteError,
    format_rank_table,
    format_ranks,
    is_secondary,
    mark_secondary,
    type_and_message,
)

# Its argument: the values of all ranks, in rank order.
Decide: TypeAlias = Callable[[list[Any]], object]
Facts: TypeAlias = Mapping[str, object]
FactsOf: TypeAlias = Callable[[], Facts]
Result: TypeAlias = dict[str, Any]

_RAISABLE = {e.__name__: e for e in (RuntimeError, ValueError, TypeError, TimeoutError)}
_SAME_CALLS = "every rank must make the same calls in the same order, but"
# Bounds of a value and an error in characters, and of errors in a result. A TCPStore closes a
# connection that sends more than 8 MiB.
_MOST, _MOST_TEXT, _MOST_ERRORS = 2**22, 2**16, 8
_SHOWN = 3  # the number of differing facts in an error


def exchange(
    client: StoreClient,
    call: str,
    contribute: Callable[[], object],
    decide: Decide = lambda _: None,
    timeout: timedelta | None = None,
) -> Any:
    """Return ``decide(values)`` of the values that `contribute` returns on the ranks. Collective.

    Values and decision must fit in JSON.

    Args:
        client: of the store.
        call: the name of the call in errors.
        contribute: returns a value. This rank raises an exception in it, and the others an error
            with its text.
        decide: runs on the rank that arrives last. Every rank raises an exception in it.
        timeout: of the wait for the other ranks; that of `client` if not given.

    Raises:
        TimeoutError: ranks did not come, or the store does not answer. The error names them.
        RuntimeError: ranks are in different calls, one has left the group, or the store has ended.
    """
    if client.size == 1:
        return decide([json.loads(json.dumps(contribute()))])
    check_allowed(call)
    this, value, error = _Round(client, call, decide), None, None
    try:
        value = contribute()
        if (length := len(json.dumps(value))) > _MOST:
            msg = f"`{call}` must compare at most {_MOST >> 20} MiB, but got {length / 2**20:.1f}"
            raise ValueError(msg)
    except Exception as raised:  # noqa: BLE001  # raised again once the other ranks know
        value, error = None, raised
    try:
        result = this.wait(timeout or client.timeout, value, error)
        # If another rank's error caused this one, raise the cause.
        failed = result.get("errors")
        if error is not None and failed and is_secondary(error) == failed[0]["is_secondary"]:
            raise error
        return this.value_or_raise(result)
    except Exception as raised:
        if error is None or raised is error:
            raise
        raise raised from error  # the error may be the reason why other ranks did not come
    finally:
        error = None  # the frame would hold the error until a garbage collection


def require_equal(client: StoreClient, call: str, facts_of: FactsOf, differ: Decide) -> None:
    """Raise unless `facts_of` returns the same on every rank; facts may be long. Collective.

    The ranks compare a digest. Only if it differs they send their facts, and all raise the error of
    `differ`.
    """
    facts: dict[str, object] = {}

    def digest() -> str:
        facts.update(facts_of())
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    if exchange(client, call, digest, lambda digests: len(set(digests)) > 1):
        exchange(client, f"{call} (in detail)", lambda: facts, differ)


def compare_facts(client: StoreClient, call: str, facts_of: FactsOf, cure: str) -> None:
    """Raise on every rank, with a table and `cure`, if `facts_of` returns different facts.

    Collective.
    """
    exchange(client, call, facts_of, lambda rows: raise_if_different(call, rows, cure))


def raise_if_different(
    call: str, rows: list[dict[str, object]], cure: str, must: str = "pass the same to"
) -> None:
    """Raise a `RuntimeError` with a table of the differing facts, if ranks differ."""
    columns = dict.fromkeys(name for facts in rows for name in facts)
    rows = [{name: facts.get(name, "(nothing)") for name in columns} for facts in rows]
    names = [name for name in columns if len({repr(facts[name]) for facts in rows}) > 1]
    if names:
        first, more = names[:_SHOWN], len(names) - _SHOWN
        lines = [", ".join(f"{name}={facts[name]!r}" for name in first) for facts in rows]
        what = ", ".join(f"`{name}`" for name in first) + (f" and {more} more" if more > 0 else "")
        what += " differs" if len(names) == 1 else " differ"
        text = f"every rank must {must} `{call}`, but {what}"
        raise RuntimeError(f"{text}:\n{format_rank_table(lines)}\n{cure}")


@contextmanager
def lead(client: StoreClient, call: str) -> Iterator[None]:
    """Run a section while the other ranks wait in `exchange`, which must follow on this rank.

    An exception in the block becomes the result of that round, so every rank raises it at once.
    """
    check_allowed(call)
    current_op.leads = section = call.partition("(")[0]
    why = f"must be reached by every rank, but the others wait for `{section}`: call it after that"
    try:
        with forbidding_calls(why):
            yield
    except BaseException as error:
        remote = RemoteError.of(error, rank=client.rank, call=section)
        with suppress(Exception):  # the error of the block matters more
            this = _Round(client, call)
            client.request(lambda store: this.publish(store, {"errors": [remote._asdict()]}))
        raise
    finally:
        current_op.leads = ""


def abort_rounds(client: StoreClient, text: str, kind: str = "RuntimeError") -> None:
    """Make each rank that waits for this one, now or later, raise an error with `text`.

    They wait in the first round without a result. It is this rank's current round, if it was
    interrupted in that, else the next one.
    """
    client.closed = client.closed or text
    result = json.dumps({"closed": [kind, text]})

    def abort(store: dist.Store) -> None:
        number = max(client.rounds, 1)
        while "closed" not in json.loads(set_once(store, f"result/{number}", result)):
            number += 1

    client.request(abort)


class _Round:
    """One rank's part in a round.

    Args:
        client: of the store.
        call: the name of the call in errors.
        decide: makes the result on the rank that arrives last.
    """

    def __init__(self, client: StoreClient, call: str, decide: Decide = lambda _: None) -> None:
        if client.closed:
            must = f"`{call}` must be reached by every rank, but no call can follow in this group"
            raise mark_secondary(RuntimeError(f"{must}: {client.closed}"))
        client.rounds += 1
        self._client, self._call, self._decide = client, call, decide
        self._number, self._where = client.rounds, call_site()
        self._key = f"result/{client.rounds}"

    def wait(self, timeout: timedelta, value: object, error: Exception | None) -> Result:
        """Contribute `value` or `error`, and return the result once it is there.

        The wait is split by the group's timeout, so that a stopped store is noticed.
        """
        before, remaining, has_arrived = current_op.push(self._call), timeout, False

        def listen(store: dist.Store) -> str:
            if not has_arrived:
                self.arrive(store, value, error)
            if wait_for(store, [self._key], patience):
                return store.get(self._key).decode()
            return "" if remaining > patience else self.publish(store, self._late(store, timeout))

        try:
            while True:
                patience = min(remaining, self._client.timeout)
                if text := self._client.request(listen, patience):
                    result: Result = json.loads(text)
                    return result
                remaining, has_arrived = remaining - patience, True
        finally:
            current_op.pop(before)

    def arrive(self, store: dist.Store, value: object, error: Exception | None) -> None:
        """Write this rank's contribution, and the result if it is the last one to arrive."""
        client, failed = self._client, None
        if error is not None:
            # The other ranks raise its text.
            text, follows = type_and_message(error), is_secondary(error)
            failed = RemoteError(client.rank, self._call, text, is_secondary=follows)._asdict()
        entry = {"round": self._number, "call": self._call, "value": value, "error": failed}
        store.set(f"at/{client.rank}", json.dumps(entry))
        if store.add(f"count/{self._number}", 1) == client.size:
            store.delete_key(f"count/{self._number}")
            # All ranks have arrived, so all have read it.
            store.delete_key(f"result/{self._number - 1}")
            self.publish(store, self._decide_result(_entries(store, client.size)))

    def publish(self, store: dist.Store, result: Result) -> str:
        """Write the result unless there is one; return the stored one."""
        return set_once(store, self._key, json.dumps(result))

    def value_or_raise(self, result: Result) -> Any:
        """Return the value of a result, or raise its error."""
        client = self._client
        if "closed" in result:
            kind, client.closed = result["closed"]
            must = f"`{self._call}` must be reached by every rank, but {client.closed}"
            raise mark_secondary(_RAISABLE[kind](f"{must}; this rank waits at {self._where}"))
        if "raises" in result:
            kind, text = result["raises"]
            raise _RAISABLE[kind](text)
        if "errors" in result:
            errors = [RemoteError(**one) for one in result["errors"]]
            if errors[0].traceback:  # an exception in a `lead` section
                raise mark_secondary(errors[0].to_exception())
            seen = f"(seen on rank {client.rank}, which did nothing wrong)"
            raise mark_secondary(RuntimeError("\n".join([*(e.summary for e in errors), seen])))
        return result["value"]

    def _late(self, store: dist.Store, timeout: timedelta) -> Result:
        """Return the result after a timeout, which names the missing ranks."""
        entries = _entries(store, self._client.size)
        late = [rank for rank, entry in enumerate(entries) if entry["round"] < self._number]
        if not late:
            # The last rank to arrive has ended before it wrote the result.
            return self._decide_result(entries)
        text = missing_ranks_text(late, self._client.size, f" within {timeout}")
        return {"closed": ["TimeoutError", text]}

    def _decide_result(self, entries: list[dict[str, Any]]) -> Result:
        """Return the result of the contributions of all ranks."""
        later = ", which comes later"  # an interrupted rank may be in a later round
        calls = [entry["call"] + later * (entry["round"] > self._number) for entry in entries]
        if len(set(calls)) > 1:
            return {"raises": ["RuntimeError", f"{_SAME_CALLS} here:\n{format_rank_table(calls)}"]}
        if failed := [entry["error"] for entry in entries if entry["error"]]:
            failed.sort(key=lambda error: error["is_secondary"])  # primary errors first
            return {"errors": failed[:_MOST_ERRORS]}
        try:
            return {"value": self._decide([entry["value"] for entry in entries])}
        except Exception as error:  # noqa: BLE001  # raised on every rank
            kind, text = type(error).__name__, str(error)[:_MOST_TEXT]
            is_raisable = kind in _RAISABLE
            return {"raises": [kind, text] if is_raisable else ["RuntimeError", f"{kind}: {text}"]}


def _entries(store: dist.Store, size: int) -> list[dict[str, Any]]:
    """Return the last contribution of each rank; it is of round 0 if there is none yet."""
    texts = multi_get_or_none(store, [f"at/{rank}" for rank in range(size)])
    return [json.loads(text or '{"round": 0}') for text in texts]


def missing_ranks_text(missing: list[int], size: int, when: str) -> str:
    """Return a text that names the missing ranks and where to look."""
    ranks = format_ranks(missing)
    return (
        f"{ranks} of {size} did not come{when}: look at the output of {ranks} for an earlier "
        f"error, or for a branch that skips this call"
    )
