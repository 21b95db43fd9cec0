"""Rendezvous: ranks meet at the store, compare their proposals, and create the process group."""

import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from pardata.environment import _device
from pardata.environment._launchers import LaunchInfo
from pardata.environment._world import GroupState, World, new_store_client, world_of_group
from pardata.process_group._shutdown import release_store, shutdown
from pardata.process_group._tcp_store import get_from_rank_zero, open_store
from pardata.store._client import StoreClient, append
from pardata.store._rank_errors import format_rank_table, summary_line
from pardata.store._round import abort_rounds, exchange, missing_ranks_text, raise_if_different

_T = TypeVar("_T")

Device: TypeAlias = torch.device | str | None  # as `init` is given it

_MARGIN = timedelta(seconds=10)


def form_group(
    launch: LaunchInfo | None, *, backend: str | None, timeout: timedelta | None, device: Device
) -> GroupState:
    """Create the process group that `launch` describes, or adopt the one that exists. Collective.

    A rank that cannot take part raises its error in a round on the store, before any group exists.
    So every rank raises it, and none waits. If the group would mix small numbers with gradients,
    `form_group` creates a gloo group for the numbers.
    """
    patience, hosts_store = timeout or dist.distributed_c10d.default_pg_timeout, False
    if launch is None:
        client = with_fresh_prefix(new_store_client(patience))
    else:
        store, hosts_store = open_store(launch, patience)
        client = with_fresh_prefix(StoreClient(store, patience, launch.rank, launch.size))
    part = client.store
    client.store = dist.PrefixStore("pardata", part)
    propose = cache(partial(_proposal, launch, backend, device))
    try:
        # Longer than rank 0's timeout, after which its error names the missing ranks.
        plan = exchange(client, "init", propose, _check_proposals, patience + _MARGIN)
        if launch is not None:
            how = {"backend": propose()["backend"], "rank": client.rank, "world_size": client.size}
            how |= {"store": dist.PrefixStore("group", part), "timeout": timeout}
            # A bound backend connects at once; a group of one rank has no peer.
            binds = plan["binds"] and client.size > 1
            how["device_id"] = torch.device(propose()["device"]) if binds else None
            create_on_all_ranks(client, partial(dist.init_process_group, **how))
        new_group = partial(_device.new_gloo_group, patience)
        cpu_group = None if plan["is_apart"] else create_on_all_ranks(client, new_group)
    except BaseException as error:  # cleans up and raises again
        if launch is not None and dist.is_initialized():
            dist.destroy_process_group()
        with suppress(Exception):  # the other ranks still read the error from the store
            if not isinstance(error, Exception):  # no round has raised it on the other ranks
                abort_rounds(client, f"rank {client.rank} failed first: {summary_line(error)}")
            release_store(client, _MARGIN, hosts_store=hosts_store)
        raise
    world = replace(_world_of(launch, propose(), plan["hosts"]), _at_the_end=shutdown)
    sharers = plan["cpu_sharers"][client.rank]
    return GroupState(world, client, hosts_store, cpu_group, cpu_sharers=sharers)


def _world_of(launch: LaunchInfo | None, proposal: dict[str, Any], hosts: list[str]) -> World:
    device = torch.device(proposal["device"])
    if launch is None:
        return world_of_group(device, hosts)
    names = list(dict.fromkeys(hosts))
    node = names.index(proposal["host"]) if launch.node_rank is None else launch.node_rank
    nodes = len(names) if launch.num_nodes is None else launch.num_nodes
    return World(*launch[1:5], node, nodes, device, proposal["backend"], launch.launcher)


def create_on_all_ranks(client: StoreClient, create: Callable[[], _T]) -> _T:
    """Return the group that `create` returns, after every rank has created it. Collective.

    torch does not wait. A rank that leaves at once closes connections that another rank is still
    opening ("connectFullMesh failed … Connection closed by peer"). And ranks try to connect to a
    failed one until the timeout.
    """
    created: list[_T] = []
    exchange(client, "init", lambda: created.append(create()), timeout=client.timeout + _MARGIN)
    return created[0]


def _proposal(launch: LaunchInfo | None, backend: str | None, wanted: Device) -> dict[str, Any]:
    """Return a rank's proposal for the group, and make its device current."""
    device = None if wanted is None else torch.device(wanted)
    if launch is None:
        world = world_of_group(device)
        device, backend = world.device, world.backend
    else:
        device = select_device(launch, device)
        backend = backend or _device.backend_for(device)
        if launch.size > 1:
            _device.check_supported(device, backend)
    host, gpu, has_one = socket.gethostname(), "", False
    if device in (seen := _device.visible_devices()):
        torch.accelerator.set_device_index(device)
        # With gloo, ranks can share a GPU.
        if launch is not None and _device.has_accelerator_backend(backend):
            # Partitions of a GPU may share its uuid, and masks number different GPUs alike.
            found = str(getattr(_device.properties_of(device), "uuid", ""))
            gpu = found and f"{found} {device.index} {_device.visibility_variables()}"
            has_one = len(seen) < 2 * launch.local_size
    else:
        _device.checked_device(device)  # raises for a missing accelerator
    facts = {"host": host, "address": "", "cpus": _device.cpus_of_process(), "gpu": gpu}
    # Only for a new group.
    if launch is not None and not os.environ.get("GLOO_SOCKET_IFNAME"):
        with suppress(OSError):  # the name of the host has no address
            facts["address"] = socket.gethostbyname(host)  # to which gloo's peers connect
    return {**facts, "device": str(device), "has_one": has_one, "backend": backend}


def select_device(launch: LaunchInfo, wanted: torch.device | None) -> torch.device:
    """Return the device of this local rank.

    Raises:
        RuntimeError: there are fewer GPUs than local ranks.
    """
    seen = _device.visible_devices()
    kind = torch.device(seen[0].type if seen else "cpu")
    if wanted is None and launch.size > 1 and _device.backend_for(kind) == "gloo":
        return torch.device("cpu")  # no backend sends from these devices
    if not seen or wanted not in (None, kind):
        return wanted or kind
    visible = len(seen)
    # The launcher has bound one GPU to each task, as SLURM's --gpus-per-task.
    if visible == 1 and _device.visibility_variables():
        return seen[0]
    if launch.local_rank >= visible:
        raise RuntimeError(
            f"the local rank must be less than the number of visible GPUs, {visible}, but is "
            f"{launch.local_rank} on {socket.gethostname()}: pass torchrun "
            f"--nproc-per-node={visible}, srun --ntasks-per-node={visible}, or `init(device='cpu')`"
        )
    return seen[launch.local_rank]


def with_fresh_prefix(client: StoreClient) -> StoreClient:
    """Return `client` with a new prefix in its store, the same on all ranks. Collective.

    A store outlives the group, and torchrun's store also the processes: after a restart it has the
    keys of the last attempt. Rank 0 chooses a random prefix. Each rank asks for it under a random
    key, so it cannot read an old answer.
    """
    if client.rank == 0:
        return _serve_prefix(client)
    store, word = client.store, os.urandom(16).hex()
    append(store, "asked", word)
    name = get_from_rank_zero(store, f"answer/{word}", client.size, client.timeout)
    part = dist.PrefixStore(name, store)
    append(part, "came", str(client.rank))
    return replace(client, store=part)


def _serve_prefix(client: StoreClient) -> StoreClient:
    """Send the prefix to each rank; if some do not come, the first round's error names them."""
    name, store = os.urandom(16).hex(), client.store
    part = dist.PrefixStore(name, store)
    append(store, "asked", "")  # both keys must exist to be read
    append(part, "came", "")
    missing, answered = set(range(1, client.size)), set[str]()
    deadline = time.monotonic() + client.timeout.total_seconds()
    while missing and time.monotonic() < deadline:
        if asked := set(store.get("asked").decode().split()) - answered:
            answers = [f"answer/{word}" for word in asked]
            store.multi_set(answers, [name] * len(asked))  # type: ignore[attr-defined]  # as in `append`
        answered |= asked
        missing -= set(map(int, part.get("came").split()))
        time.sleep(0.005)
    if missing:
        text = missing_ranks_text(sorted(missing), client.size, f" within {client.timeout}")
        abort_rounds(replace(client, store=dist.PrefixStore("pardata", part)), text, "TimeoutError")
    return replace(client, store=part)


def _check_proposals(proposals: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the plan of the group; raise if the ranks' proposals do not fit together."""
    backends: list[dict[str, object]] = [{"backend": one["backend"]} for one in proposals]
    raise_if_different("init", backends, "Is a GPU driver missing on a node? Else pass `backend`.")
    hosts = [one["host"] for one in proposals]
    cpus = [(one["host"], *one["cpus"]) for one in proposals]
    sharers = Counter(cpus)
    if len({*hosts}) > 1 and any(one["address"].startswith("127.") for one in proposals):
        rows = format_rank_table([f"{one['host']} is {one['address']}" for one in proposals])
        raise RuntimeError(
            f"each host name must have an address that others reach, but one is local:\n{rows}\n"
            f"Set GLOO_SOCKET_IFNAME to the interface (see `ip -br addr`), or correct /etc/hosts."
        )
    gpus = Counter((one["host"], one["gpu"]) for one in proposals if one["gpu"])
    for (host, _), ranks in gpus.items():
        if ranks > 1:
            raise RuntimeError(
                f"{ranks} ranks on {host} share one GPU: start one per GPU, or init(backend='gloo')"
            )
    ways = [(one["backend"], torch.device(one["device"])) for one in proposals]
    is_apart = len(ways) == 1 or all(_device.has_cpu_backend_beside(*way) for way in ways)
    # Bind the group on all ranks or on none, because bound ranks connect at once. Not if a process
    # sees several GPUs, because a bound group accepts tensors of no other GPU.
    binds = all(one["has_one"] for one in proposals)
    # The number of ranks of the same host and the same cores, for each rank.
    cpu_sharers = [sharers[one] for one in cpus]
    return {"hosts": hosts, "cpu_sharers": cpu_sharers, "binds": binds, "is_apart": is_apart}
