"""Meet the other ranks, agree that everybody can take part, and make the process group."""

import json
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pardata.collectives._consensus import require_same
from pardata.environment import _backend, _device
from pardata.environment._launchers import Launch
from pardata.environment._world import Joined, World, new_channel
from pardata.process_group._shutdown import check_out, leave_at_the_end
from pardata.process_group._tcp_store import not_met, store_of
from pardata.store._client import Channel, append
from pardata.store._rank_format import ranks_by, ranks_text
from pardata.store._round import all_say

_T = TypeVar("_T")

_MARGIN = timedelta(seconds=10)


def join(
    launch: Launch,
    *,
    backend: str | None,
    timeout: timedelta | None,
    device: torch.device | str | None,
) -> Joined:
    """Make the process group that `launch` describes, and one for small numbers if it needs it.

    Collective. A rank that cannot take part says so over the store before any group exists. So the
    error is raised on every rank, and no other rank waits.
    """
    patience = distributed_c10d.default_pg_timeout if timeout is None else timeout
    store, hosts_store = store_of(launch, patience)
    channel = with_fresh_part(Channel(store, patience, launch.rank, launch.size))
    store = channel.store
    channel = replace(channel, store=dist.PrefixStore("pardata/join", store))
    arrive = cache(partial(_arrival, launch, backend, device))
    try:
        hosts, binds, apart = all_say(channel, "init", arrive, _agreed)
        own = arrive()
        device, backend = torch.device(own["device"]), own["backend"]

        how: dict[str, Any] = {"rank": launch.rank, "world_size": launch.size, "timeout": timeout}
        how["store"] = dist.PrefixStore("group", store)
        # Lets it connect at once; a group of one has nobody to connect to.
        how["device_id"] = device if binds and launch.size > 1 else None
        once_made(channel, partial(dist.init_process_group, backend, **how))
        counts = None if apart else once_made(channel, partial(_backend.new_gloo_group, patience))
    except Exception:  # only to clean up: it is raised again
        if dist.is_initialized():
            dist.destroy_process_group()
        # The others read the same; the store must be there until they have.
        check_out(store, launch.size, hosts_store=hosts_store)
        raise
    node = hosts.index(own["host"]) if launch.node_rank is None else launch.node_rank
    nodes = len(hosts) if launch.num_nodes is None else launch.num_nodes
    here = World(*launch[1:5], node, nodes, device, backend, launch.launcher, leave_at_the_end)
    return Joined(here, new_channel(timeout), hosts_store, counts)


def once_made(channel: Channel, make: Callable[[], _T]) -> _T:
    """Return the group that `make` makes, once every rank has made it. Collective.

    torch does not wait: a rank that leaves at once closes connections that another is still making
    ("connectFullMesh failed … Connection closed by peer"). And the others connect to one that has
    failed for as long as the timeout.
    """
    made: list[_T] = []
    later = replace(channel, timeout=channel.timeout + _MARGIN)
    all_say(later, "init", lambda: made.append(make()), lambda _: None)
    return made[0]


def _arrival(
    launch: Launch, backend: str | None, wanted: torch.device | str | None
) -> dict[str, Any]:
    """Return what a rank tells the others before there is a group; make its device current."""
    device = own_device(launch, None if wanted is None else _device.named_device(wanted))
    backend = backend or _backend.backend_for(device)
    if launch.size > 1:
        _backend.require_taken(device, backend)
    host, gpu, has_one = socket.gethostname(), "", False
    if device in (seen := _device.visible_devices()):
        torch.accelerator.set_device_index(device)
        if _backend.runs_on_gpus(backend):  # gloo's ranks can share one
            gpu = str(getattr(_device.properties_of(device), "uuid", ""))
            has_one = len(seen) < 2 * launch.local_size
    return {"host": host, "device": str(device), "gpu": gpu, "one": has_one, "backend": backend}


def own_device(launch: Launch, wanted: torch.device | None) -> torch.device:
    """Return the device of this local rank.

    Raises:
        RuntimeError: if it is not here, or no GPU is left for it.
    """
    seen = _device.visible_devices()
    kind = torch.device(seen[0].type if seen else "cpu")
    if wanted is None and launch.size > 1 and _backend.backend_for(kind) == "gloo":
        return torch.device("cpu")  # because ranks could not send from another kind
    if not seen or wanted not in (None, kind):
        _device.require_visible(wanted or kind)
        return wanted or kind
    visible = len(seen)
    # A launcher that binds a GPU to each task, as SLURM's --gpus-per-task: it is this one's own.
    if visible == 1 and _device.masks():
        return seen[0]
    if launch.local_rank >= visible:
        raise RuntimeError(
            f"the local rank must be less than the number of visible GPUs, {visible}, but is "
            f"{launch.local_rank} of {launch.local_size} on {socket.gethostname()}: start "
            f"{visible} process{'es' if visible > 1 else ''} per node (torchrun "
            f"--nproc-per-node={visible}, srun --ntasks-per-node={visible}), or pass "
            f'`init(device="cpu")`'
        )
    return seen[launch.local_rank]


def with_fresh_part(channel: Channel) -> Channel:
    """Return `channel` with a part of its store that nobody used before. Collective.

    A store outlives the group, and torchrun's the processes too: after a restart it still holds
    what the last attempt left. Rank 0 invents a name; each rank asks for it with a word of its
    own, so that no answer can be an old one.
    """
    if channel.rank == 0:
        return _handed_out(channel)
    store, word = channel.store, uuid.uuid4().hex
    append(store, "asked", word)
    try:
        store.wait([f"answer/{word}"], channel.timeout)
        part = dist.PrefixStore(store.get(f"answer/{word}").decode(), store)
        append(part, "came", str(channel.rank))
        part.wait(["missing"], channel.timeout + _MARGIN)  # rank 0 waits as long for the last of us
        missing = json.loads(part.get("missing"))
    except RuntimeError as error:
        raise not_met([0], channel.size, channel.timeout) from error
    if missing:
        raise not_met(missing, channel.size, channel.timeout)
    return replace(channel, store=part)


def _handed_out(channel: Channel) -> Channel:
    name, store = uuid.uuid4().hex, channel.store
    part = dist.PrefixStore(name, store)
    append(store, "asked", "")  # to read both before anybody came
    append(part, "came", "")
    missing, answered = set(range(1, channel.size)), set[str]()
    deadline = time.monotonic() + channel.timeout.total_seconds()
    while missing and time.monotonic() < deadline:
        asked = set(store.get("asked").decode().split()) - answered
        if asked:
            answers = [f"answer/{word}" for word in asked]
            store.multi_set(answers, [name] * len(asked))  # type: ignore[attr-defined]  # as in `append`
        answered |= asked
        missing -= set(map(int, part.get("came").split()))
        time.sleep(0.005)
    part.set("missing", json.dumps(sorted(missing)))
    if missing:
        time.sleep(1)  # the store may live here: those who came read it now
        raise not_met(sorted(missing), channel.size, channel.timeout)
    return replace(channel, store=part)


def _agreed(arrivals: list[dict[str, Any]]) -> tuple[list[str], bool, bool]:
    """Require that all ranks can make one group; return the hosts, and how to make it.

    Whether it binds GPUs, and whether small numbers travel apart in it by themselves.
    """
    backends: list[dict[str, object]] = [{"backend": arrival["backend"]} for arrival in arrivals]
    require_same("init", backends, "Is a GPU driver missing on a node? Else pass `backend`.")
    gpus = ((rank, (arrival["host"], arrival["gpu"])) for rank, arrival in enumerate(arrivals))
    for (host, gpu), ranks in ranks_by(gpus).items():
        if gpu and len(ranks) > 1:
            raise RuntimeError(
                f"every rank must have a GPU of its own, but {ranks_text(ranks)} "
                f"on {host} share one: start one process per GPU, or pass "
                f'`init(backend="gloo")`, which can share (slowly)'
            )
    # All ranks or none, for those that are bound connect at once; and none if a process has
    # several, over which a model may be spread: a group that is bound takes no other GPU.
    binds = all(arrival["one"] for arrival in arrivals)
    ways = [(arrival["backend"], torch.device(arrival["device"])) for arrival in arrivals]
    apart = len(ways) == 1 or all(_backend.sends_numbers_apart(*way) for way in ways)
    return list(dict.fromkeys(arrival["host"] for arrival in arrivals)), binds, apart
