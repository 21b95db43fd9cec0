"""What is decided in a turn, on the entries that the ranks have left: plain data.

An entry says in which ``turn`` and ``call`` a rank is, and ``where`` in the user's code. It also
has the rank's ``value`` or, if the rank ``failed``, the `Failure`.
A verdict names the ``rank`` that gave it and its ``call``. It says one thing more: the
``decision``, or the ``error`` that the decision raised. Or it says how ranks have ``failed``,
causes first, or rank 0 alone, which worked for all. Or it says why all is ``off``, and which ranks
are ``missing``. One that is too long for a value of the store is there in ``parts``.
"""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pardata.store._client import PART, put_in_parts, texts_of
from pardata.store._rank_format import ranks_text, table_of

Entry = dict[str, Any]
Verdict = dict[str, Any]
Decide = Callable[[list[Any]], object]  # gets what all said, in rank order

KINDS = {error.__name__: error for error in (RuntimeError, ValueError, TypeError)}
ORDER = "every rank must make the same calls in the same order, but"


def entries_of(store: dist.Store, size: int) -> list[Entry | None]:
    """Return the entries of all ranks, and None for one that was in no turn yet."""
    texts = texts_of(store, [f"at/{rank}" for rank in range(size)])
    return [None if text is None else json.loads(text) for text in texts]


def key_of(turn: int) -> str:
    """Return under which key the verdict on a turn stands."""
    return f"verdict/{turn}"


def give(store: dist.Store, turn: int, verdict: Verdict) -> Verdict:
    """Let `verdict` stand if none does; return the one that stands, which may be in parts."""
    key, text = key_of(turn), json.dumps(verdict)
    found: Verdict = json.loads(text)
    if len(text) > PART:
        parts = put_in_parts(store, f"{key}/{verdict['rank']}", text)
        text = json.dumps({"rank": verdict["rank"], "call": verdict["call"], "parts": parts})
    stands = store.compare_set(key, "", text).decode()
    if stands != text:
        found = json.loads(stands)
    else:
        store.set(key, text)  # wakes who waits: a TCPStore without libuv does not, above
    return found


def judge(
    entries: Sequence[Entry | None], turn: int, decide: Decide | None, timeout: timedelta
) -> Verdict | None:
    """Return the verdict on a turn; None if rank 0 is still to give it."""
    behind = [rank for rank, entry in enumerate(entries) if entry is None or entry["turn"] < turn]
    if behind:
        news = who_did_not_come(behind, len(entries), f" within {timeout}")
        return {"missing": behind, "off": news}
    told = [entry for entry in entries if entry is not None]
    here = [entry for entry in told if entry["turn"] == turn]
    if len({entry["call"] for entry in here}) > 1 or (decide and len(here) < len(told)):
        calls = [e["call"] + (", which comes later" if e["turn"] > turn else "") for e in told]
        return {"error": ["RuntimeError", f"{ORDER} here:\n{table_of(calls)}"]}
    if decide is None:
        return None
    if failed := [entry["failed"] for entry in here if entry["failed"]]:
        return {"failed": sorted(failed, key=lambda failure: not failure["is_cause"])}
    try:
        return {"decision": decide([entry["value"] for entry in here])}
    except Exception as error:  # noqa: BLE001  # raised on every rank
        kind, text = type(error).__name__, str(error)
        return {"error": [kind, text] if kind in KINDS else ["RuntimeError", f"{kind}: {text}"]}


def who_did_not_come(missing: list[int], size: int, when: str) -> str:
    """Name these ranks, and say where to look."""
    ranks = ranks_text(missing)
    return (
        f"{ranks} of {size} did not come{when}: look at the output of {ranks} for an earlier "
        f"error, or for a branch that skips this call"
    )
