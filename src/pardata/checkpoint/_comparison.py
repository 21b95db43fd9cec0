"""What ranks tell each other before a checkpoint: that they mean the same, and their generators."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pardata.collective._agreement import Facts, agree, require_same, same
from pardata.ranks._store import collect, publish
from pardata.ranks._world import World, channel
from pardata.seeds._generators import generator_states

_CURE = (
    "Pass the same on all ranks: `all_gather` collects what is not, and `rank_zero_call` gives all "
    "the name of a directory that rank 0 has made."
)


def agree_on(here: World, place: str, options: Callable[[], Facts]) -> None:
    """Require all ranks to pass the same options, by name. Collective.

    What `options` raises is raised on every rank.
    """
    agree(here, place, options, lambda told: require_same(place, told, _CURE))


def agree_on_all(
    here: World, place: str, options: Callable[[], Facts], details: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Require all ranks to pass the same options and details. Collective.

    Args:
        here: the world.
        place: the name of the call.
        options: returns them by name. What it raises is raised on every rank.
        details: are there after that. They are compared by a digest, and told where that differs.

    Returns:
        Where the default generators of all ranks are, on rank 0.
    """
    if here.size == 1:
        options()
        return [generator_states(here.device)]

    def tell() -> Facts:
        facts = options()
        if here.rank > 0:
            publish(channel(), _key(here.rank), json.dumps(generator_states(here.device)))
        return {"options": facts, "details": details}

    same(here, place, tell, lambda told: _compare(place, told))
    return _generators_of_all(here) if here.rank == 0 else []


def _compare(place: str, told: list[dict[str, Any]]) -> None:
    """Raise where ranks differ in options, or in details, of which each may have its own."""
    require_same(place, [facts["options"] for facts in told], _CURE)
    paths = list(dict.fromkeys(path for facts in told for path in facts["details"]))
    filled = [{path: facts["details"].get(path, "(nothing)") for path in paths} for facts in told]
    require_same(place, filled, _CURE)


def _generators_of_all(here: World) -> list[dict[str, Any]]:
    # Not in a turn, which would take them from all to all. They are there: all have agreed.
    others = collect(channel(), [_key(rank) for rank in range(1, here.size)])
    return [generator_states(here.device), *map(json.loads, others)]


def _key(rank: int) -> str:
    return f"generators/{rank}"
