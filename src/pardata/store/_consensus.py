"""Ranks that must have equal values, else an error on all of them with a table."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TypeAlias

from pardata.store._client import StoreClient
from pardata.store._rank_format import format_rank_table
from pardata.store._round import Decide, exchange

Facts: TypeAlias = Mapping[str, object]


def require_equal(
    client: StoreClient, call: str, facts_of: Callable[[], Facts], differ: Decide
) -> None:
    """Require that `facts_of` returns the same on every rank, of whatever length. Collective.

    The ranks compare a digest. Only if it differs, they send their facts to one rank, and all raise
    what `differ` raises there.
    """
    facts: dict[str, object] = {}

    def digest() -> str:
        facts.update(facts_of())
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    if exchange(client, call, digest, lambda digests: len(set(digests)) > 1):
        exchange(client, f"{call} (in detail)", lambda: facts, differ)


def raise_if_different(call: str, rows: list[dict[str, object]], cure: str) -> None:
    """Raise a `RuntimeError` with a table of the facts in which ranks differ, if they do."""
    known = dict.fromkeys(name for facts in rows for name in facts)
    rows = [{name: facts.get(name, "(nothing)") for name in known} for facts in rows]
    names = [name for name in known if len({repr(facts[name]) for facts in rows}) > 1]
    if names:
        lines = [", ".join(f"{name}={facts[name]!r}" for name in names) for facts in rows]
        what = f"{', '.join(f'`{name}`' for name in names)} differ{'s' if len(names) == 1 else ''}"
        must = f"every rank must pass the same to `{call}`, but {what}"
        raise RuntimeError(f"{must}:\n{format_rank_table(lines)}\n{cure}")
