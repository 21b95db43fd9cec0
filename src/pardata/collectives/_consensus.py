"""Ranks that disagree find out at once, on every rank, with a table of who has what."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from pardata.environment._world import World, channel
from pardata.store._rank_format import table_of
from pardata.store._round import Patience, Say, all_say
from pardata.store._verdict import Decide

Facts = Mapping[str, object]


def agree(
    here: World, call: str, state: Say, decide: Decide = lambda _: None, timeout: Patience = None
) -> Any:
    """Return what `decide` makes of what `state()` gives on every rank, in rank order. Collective.

    All hear the decision alone, which is nothing by default. It and the values must be JSON-like.
    An exception that `state` raises on one rank is raised there, and sent to the others. So no rank
    waits because of a bad argument on another. One that `decide` raises is raised on all. The
    group's timeout holds if none is given.
    """
    if here.size > 1:
        return all_say(channel(), call, state, decide, timeout=timeout)
    return decide([json.loads(json.dumps(state()))])


def same(here: World, call: str, state: Callable[[], Facts], differ: Decide) -> None:
    """Require that `state()` gives the same on every rank, however long it is. Collective.

    A digest travels; only if digests differ, what they are of: to one rank, which raises on all
    what `differ` raises.
    """
    facts: dict[str, object] = {}

    def digest() -> str:
        facts.update(state())
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    if agree(here, call, digest, lambda digests: len(set(digests)) > 1):
        agree(here, f"{call} (in detail)", lambda: facts, differ)


def require_same(call: str, rows: list[dict[str, object]], cure: str) -> None:
    """Raise a `RuntimeError` with a table of the facts in which ranks differ, if they do.

    Of a fact that a rank does not have, the table says so.
    """
    known = dict.fromkeys(name for facts in rows for name in facts)
    rows = [{name: facts.get(name, "(nothing)") for name in known} for facts in rows]
    names = [name for name in known if len({repr(facts[name]) for facts in rows}) > 1]
    if names:
        table = table_of([", ".join(f"{name}={facts[name]!r}" for name in names) for facts in rows])
        what = f"{', '.join(f'`{name}`' for name in names)} differ{'s' if len(names) == 1 else ''}"
        raise RuntimeError(
            f"every rank must pass the same to `{call}`, but {what}:\n{table}\n{cure}"
        )
