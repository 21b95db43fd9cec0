"""Ranks that disagree find out at once, on every rank, with a table of who has what."""

import json
from collections.abc import Callable, Mapping

from pardata.ranks._store import Channel, Peer
from pardata.ranks._table import table_of
from pardata.ranks._turn import all_say
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
    told: list[dict[str, object]] = all_say(line or channel(), here, place, state, list)
    return told


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
