"""Ranks that disagree find out at once, on every rank, with a table of who has what."""

import json
from collections.abc import Callable, Mapping

from pardata._failure import Failure
from pardata._store import exchange, raise_on_all
from pardata._world import World, channel

Facts = Mapping[str, object]


def agree(here: World, place: str, state: Callable[[], Facts]) -> list[dict[str, object]]:
    """Return what `state()` gives on every rank, in rank order. Collective.

    The values must be JSON-like. An exception that `state` raises on one rank is raised there,
    and told to the others, so that a bad argument on one rank leaves nobody waiting.
    """
    own: Exception | None = None
    facts: Facts = {}
    told_facts = "{}"
    try:
        facts = state()
        told_facts = json.dumps(facts)
    except Exception as error:  # noqa: BLE001  # raised again below, on every rank
        own = error
    if here.size == 1:
        raise_on_all([], here.rank, own)
        return [dict(facts)]
    failure = None if own is None else Failure.of(own, rank=here.rank, place=place).to_json()
    line = channel()
    try:
        texts = exchange(line, here, place, json.dumps([failure, told_facts]), line.timeout)
    except Exception as error:
        if own is None:
            raise
        raise error from own  # which may be why the others did not come
    told = [json.loads(text) for text in texts]
    raise_on_all([f and Failure.from_json(f) for f, _ in told], here.rank, own)
    return [json.loads(facts) for _, facts in told]
