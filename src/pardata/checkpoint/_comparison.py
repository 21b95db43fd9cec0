"""What ranks tell each other before a checkpoint: that they mean the same, and their generators."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from pardata.collective._agreement import Facts, agree, require_same
from pardata.ranks._store import collect, publish
from pardata.ranks._world import World, channel
from pardata.seeds._generators import generator_states

_CURE = (
    "Pass the same on all ranks: `all_gather` collects what is not, and `rank_zero_call` gives all "
    "the name of a directory that rank 0 has made."
)
_DIGEST = "the digest of the details"


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
        digest = hashlib.sha256(json.dumps(details, sort_keys=True).encode()).hexdigest()
        return {**facts, _DIGEST: digest}

    told = agree(here, place, tell)
    digests = {facts.pop(_DIGEST) for facts in told}
    require_same(place, told, _CURE)
    if len(digests) > 1:
        told = agree(here, f"{place} (in detail)", lambda: details)
        paths = list(dict.fromkeys(path for facts in told for path in facts))
        filled = [{path: facts.get(path, "(nothing)") for path in paths} for facts in told]
        require_same(place, filled, _CURE)
    return _generators_of_all(here) if here.rank == 0 else []


def _generators_of_all(here: World) -> list[dict[str, Any]]:
    # Not in a turn, which would take them from all to all. They are there: all have agreed.
    others = collect(channel(), [_key(rank) for rank in range(1, here.size)])
    return [generator_states(here.device), *map(json.loads, others)]


def _key(rank: int) -> str:
    return f"generators/{rank}"
