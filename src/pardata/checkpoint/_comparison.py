"""What ranks tell each other before a checkpoint: that they mean the same, and their generators."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from pardata.checkpoint import _state as states
from pardata.collective._agreement import agree, require_same
from pardata.ranks._store import collect, publish
from pardata.ranks._world import World, channel
from pardata.seeds._generators import generator_states

_CURE = (
    "Pass the same on all ranks: `all_gather` collects what is not, and `rank_zero_call` gives all "
    "the name of a directory that rank 0 has made."
)


def agree_on_options(here: World, place: str, options: Callable[[], Mapping[str, object]]) -> None:
    """Require all ranks to pass the same. Collective.

    Args:
        here: the world.
        place: the name of the call.
        options: returns it by name. What it raises is raised on every rank.
    """
    require_same(place, agree(here, place, options), _CURE)


def agree_on_states(
    here: World, place: str, tree: Mapping[str, states.Tree]
) -> list[dict[str, Any]]:
    """Require all ranks to have the same in a tree, but for the values of tensors. Collective.

    Returns:
        Where the default generators of all ranks are, on rank 0.
    """
    if here.size == 1:
        return [generator_states(here.device)]
    leaves = states.leaves(tree)
    digest = hashlib.sha256(json.dumps(leaves, sort_keys=True).encode()).hexdigest()

    def tell() -> dict[str, object]:
        publish(channel(), _key(here.rank), json.dumps(generator_states(here.device)))
        return {"states": digest}

    told = agree(here, f"{place} (states)", tell)
    if len({str(facts["states"]) for facts in told}) > 1:
        told = agree(here, f"{place} (in detail)", lambda: leaves)
        paths = list(dict.fromkeys(path for facts in told for path in facts))
        filled = [{path: facts.get(path, "(nothing)") for path in paths} for facts in told]
        require_same(place, filled, _CURE)
    return _told_generators(here, place)


def _told_generators(here: World, place: str) -> list[dict[str, Any]]:
    # Not by an exchange, which would take them from all to all.
    if not here.is_main:
        return []
    line = channel()
    keys = [_key(rank) for rank in range(here.size)]
    return [json.loads(collect(line, key, 1, place, line.timeout)) for key in keys]


def _key(rank: int) -> str:
    return f"generators/{rank}"
