"""Ranks that disagree find out at once, on every rank, with a table of who has what."""

import json
from collections.abc import Callable, Mapping, Sequence

from pardata.ranks._failure import Failure, as_consequence
from pardata.ranks._store import Channel, Peer, exchange
from pardata.ranks._table import table_of
from pardata.ranks._world import channel

Facts = Mapping[str, object]


def agree(
    here: Peer, place: str, state: Callable[[], Facts], line: Channel | None = None
) -> list[dict[str, object]]:
    """Return what `state()` gives on every rank, in rank order. Collective.

    The values must be JSON-like. An exception that `state` raises on one rank is raised there,
    and told to the others, so that a bad argument on one rank leaves nobody waiting. They meet on
    the group's store, or on `line`.
    """
    if here.size == 1:
        facts = state()
        json.dumps(facts)  # what could not be told to others
        return [dict(facts)]
    own: Exception | None = None
    failure: str | None = None
    told = "{}"
    try:
        told = json.dumps(state())
    except Exception as error:  # noqa: BLE001  # raised again below, on every rank
        own, failure = error, Failure.of(error, rank=here.rank, place=place).to_json()
    line = line or channel()
    try:
        texts = exchange(line, here, place, json.dumps([failure, told]), line.timeout)
    except Exception as error:
        if own is None:
            raise
        raise error from own  # which may be why the others did not come
    found = [json.loads(text) for text in texts]
    raise_on_all([f and Failure.from_json(f) for f, _ in found], here.rank, own)
    return [json.loads(facts) for _, facts in found]


def raise_on_all(failures: Sequence[Failure | None], rank: int, own: BaseException | None) -> None:
    """Raise where any rank failed: `own` on the rank that did, its account on the others."""
    if own is not None:
        raise own
    failed = [failure for failure in failures if failure is not None]
    if failed:
        others = "".join(f"\n{failure.summary()}" for failure in failed[1:])
        msg = f"{failed[0].summary()}{others}\n(seen on rank {rank}, which did nothing wrong)"
        raise as_consequence(RuntimeError(msg))


def require_same(place: str, told: list[dict[str, object]], cure: str) -> None:
    """Raise a `RuntimeError` with a table of the facts in which ranks differ, if they do."""
    names = [name for name in told[0] if len({repr(facts[name]) for facts in told}) > 1]
    if names:
        table = table_of([", ".join(f"{name}={facts[name]!r}" for name in names) for facts in told])
        msg = (
            f"every rank must pass the same to `{place}`, but "
            f"{', '.join(f'`{name}`' for name in names)} differ:\n{table}\n{cure}"
        )
        raise RuntimeError(msg)
