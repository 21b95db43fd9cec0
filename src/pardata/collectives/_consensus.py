"""Ranks that disagree find out at once, on every rank, by a table of their values."""

import hashlib
import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from pardata.environment._world import World, store_client
from pardata.store._rank_format import format_rank_table
from pardata.store._round import Decide, exchange

Facts = Mapping[str, object]


def consensus(
    here: World,
    call: str,
    contribute: Callable[[], object],
    decide: Decide = lambda _: None,
    timeout: timedelta | None = None,
) -> Any:
    """Return what `decide` makes of the values of `contribute` on all ranks. Collective.

    As `exchange`, also in a single process. The values and the decision must fit in JSON.
    """
    if here.size > 1:
        return exchange(store_client(), call, contribute, decide, timeout)
    return decide([json.loads(json.dumps(contribute()))])


def require_equal(here: World, call: str, facts_of: Callable[[], Facts], differ: Decide) -> None:
    """Require that `facts_of` returns the same on every rank, of whatever length. Collective.

    The ranks compare a digest. Only if it differs, they send their facts to one rank, and all raise
    what `differ` raises there.
    """
    facts: dict[str, object] = {}

    def digest() -> str:
        facts.update(facts_of())
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    if consensus(here, call, digest, lambda digests: len(set(digests)) > 1):
        consensus(here, f"{call} (in detail)", lambda: facts, differ)


def raise_if_different(call: str, rows: list[dict[str, object]], cure: str) -> None:
    """Raise a `RuntimeError` with a table of the facts in which ranks differ, if they do."""
    known = dict.fromkeys(name for facts in rows for name in facts)
    rows = [{name: facts.get(name, "(nothing)") for name in known} for facts in rows]
    names = [name for name in known if len({repr(facts[name]) for facts in rows}) > 1]
    if names:
        lines = [", ".join(f"{name}={facts[name]!r}" for name in names) for facts in rows]
        what = f"{', '.join(f'`{name}`' for name in names)} differ{'s' if len(names) == 1 else ''}"
        table = format_rank_table(lines)
        raise RuntimeError(
            f"every rank must pass the same to `{call}`, but {what}:\n{table}\n{cure}"
        )
