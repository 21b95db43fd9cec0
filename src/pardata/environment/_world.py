"""The current world, and the state that `init` creates.

The state is valid for torch's default group at the time of `init`, and for this process. So it
becomes invalid when the group is destroyed, and in a forked child.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from threading import current_thread, main_thread
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from pardata.environment import _device
from pardata.environment._launchers import detect_launch, read_ints
from pardata.environment._logger import get_logger
from pardata.store._client import StoreClient

# The version of the distribution, which checkpoints record.
__version__ = "0.1.0"

# Called at the end of ``with init()``, with its exception.
_AtTheEnd = Callable[[BaseException | None], None]
_CPU = torch.device("cpu")

_log = get_logger(__name__)


@dataclass(frozen=True)
class World(AbstractContextManager["World"]):
    """The processes of this run, seen from one of them. Returned by `init` and `world`.

    As a context manager it leaves, at the end of the block, the group that `init` joined. If an
    exception leaves the block, the other ranks get an error too, even if it is caught outside.

    Attributes:
        rank: number of this process, 0 to `size` - 1.
        size: number of processes.
        local_rank: number of this process on its node.
        local_size: number of processes on this node.
        node_rank: number of this node.
        num_nodes: number of nodes.
        device: where this process computes.
        backend: of the process group, such as ``"cuda:nccl,cpu:gloo"``; ``None`` without a group.
        launcher: ``"torchrun"``, ``"slurm"``, ``"mpi"``, ``"existing"`` (the group was there before
            `init`) or ``"single"``.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    backend: str | None
    launcher: str
    _at_the_end: _AtTheEnd | None = field(default=None, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_rank == 0

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._at_the_end is not None:
            self._at_the_end(error)


@dataclass(eq=False)  # frozen or comparable it would take longer to import
class GroupState:
    """The group that `init` created or adopted, and its resources.

    Attributes:
        world: the world of this process.
        client: the client of the group's store.
        hosts_store: whether this process runs the store's server.
        cpu_group: a gloo group for small tensors on the CPU; None if the default group can carry
            them without mixing them with gradients.
        group: a weak reference to the default group at that time, which its owner may destroy.
        pid: of this process.
        resources: callbacks of the resources of `init`, called in reverse order.
        cpu_sharers: how many ranks of this host are bound to the same cores, this one included.
        hang_after: the wait after which the watchdog logs a stall; 0 without a watchdog.
        has_failed: whether this rank has logged that it failed.
    """

    world: World
    client: StoreClient
    hosts_store: bool = False
    cpu_group: Any = None
    group: Callable[[], object] = field(default_factory=lambda: weakref.ref(dist.group.WORLD))
    pid: int = field(default_factory=os.getpid)
    resources: ExitStack = field(default_factory=ExitStack)
    cpu_sharers: int = 1
    hang_after: timedelta = timedelta(0)
    has_failed: bool = False

    def is_current(self) -> bool:
        """Whether the default group is the one of that time."""
        return dist.group.WORLD is not None and self.group() is dist.group.WORLD


class Process:
    """The state of this process; `group_state` returns it if it is still valid.

    Attributes:
        state: the state that `init` has set.
        other: a weak reference to a group that was made without `init`, and a client of its store.
        others: number of such groups so far.
        was_asked: whether `world` was called while there was no group.
    """

    state: GroupState | None = None
    other: tuple[Callable[[], object], StoreClient] | None = None
    others: int = 0
    was_asked: bool = False


process = Process()


def is_single_process() -> bool:
    """Return whether the group has one process, or there is none; takes less time than `world`."""
    group = dist.group.WORLD
    return group is None or group.size() == 1


def world() -> World:
    """Return the current world: the single-process one if no group was joined.

    It is cheap, not collective, and never joins. It also sees a group that was made without `init`.
    DataLoader workers and forked children get the single-process world. Before `init`, under a
    launcher of several processes, it logs a warning once: each process is then rank 0 of 1.

    >>> world().size
    1
    """
    found = current_world()
    if found.backend is None and not process.was_asked:
        process.was_asked = True
        try:
            require_world("world()", is_collective=False)
        except (RuntimeError, ValueError) as error:
            _log.warning("%s; this process is rank 0 of 1", error, ranks=[0])
    return found


def current_world() -> World:
    """Return the current world, without the warning of `world`."""
    # `PARDATA_LAUNCHER=none`, unless `init` has created a group of one.
    alone = process.state is None and os.environ.get("PARDATA_LAUNCHER") == "none"
    if alone or is_child() or dist.group.WORLD is None:
        return single_world()
    found = group_state()
    return world_of_group(None) if found is None else found.world


def require_world(what: str, *, is_collective: bool = True) -> World:
    """Return the current world, or raise if `what` needs a group that was not joined.

    Raises:
        RuntimeError: a launcher started several processes, and `init` was not called. Or it is a
            collective call in another thread than that of the last `init`.
    """
    found = current_world()
    if is_collective and found.size > 1 and not _device.in_backward():  # in PyTorch's threads
        client = store_client(found)
        this, owner = current_thread(), client.thread or current_thread()
        if owner is not this and (owner.is_alive() or this is not main_thread()):
            raise RuntimeError(
                f"`{what}` must be called in the thread of all collectives, {owner.name!r}, but is "
                f"in {this.name!r}: call it there, or train here alone, after `pardata.init()` here"
            )
        client.thread = this
    if found.backend is not None or is_child():
        return found
    launch = detect_launch(os.environ)
    if launch.size > 1:
        raise RuntimeError(
            f"`{what}` needs the process group: {launch.launcher} started {launch.size} processes, "
            f"but `pardata.init()` was not called: call it first, or set PARDATA_LAUNCHER=none"
        )
    return found


def store_client(world: World | None = None) -> StoreClient:
    """Return the client of the current group's store; one of size 1 if `world` is a single rank."""
    if (world or current_world()).size == 1:
        return StoreClient(dist.HashStore(), timedelta(0), 0, 1)
    if (found := group_state()) is not None:
        return found.client
    if process.other is None or process.other[0]() is not dist.group.WORLD:
        # A prefix for each group and each restart under torchrun, because they may share a store
        # with old keys.
        process.others += 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"pardata/{attempt}/{process.others}"
        process.other = weakref.ref(dist.group.WORLD), new_store_client(None, prefix)
    return process.other[1]


def group_state() -> GroupState | None:
    """Return the state that `init` has set, or None if another group is current."""
    found = process.state
    return found if found is not None and found.is_current() else None


def is_child() -> bool:
    """Whether this is a forked child or a DataLoader worker, which must not touch the group."""
    found = process.state
    forked = found is not None and found.pid != os.getpid()
    return forked or get_worker_info() is not None


def single_world() -> World:
    """Return the world of a single process."""
    # A child must not wake the GPU that its parent uses.
    device = _device.current_device(0) if not is_child() and _device.visible_devices() else _CPU
    return World(0, 1, 0, 1, 0, 1, device, None, "single")


def world_of_group(device: torch.device | None, hosts: Sequence[str] = ()) -> World:
    """Return the world of a group that `init` has not created.

    Args:
        device: the device of this rank. Without an index it is the GPU of this rank, and so without
            a `device` if the group has a backend for GPUs.
        hosts: the host of each rank. Without them each node has ``LOCAL_WORLD_SIZE`` ranks; without
            that variable there is one node.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    # Ray Train and torchrun set these variables.
    env = read_ints(os.environ, ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if not hosts:  # nodes of equal size, or one node
        local_size = env.get("LOCAL_WORLD_SIZE") or size
        hosts = [str(number // local_size) for number in range(size)]
    host, names = hosts[rank], list(dict.fromkeys(hosts))
    local_rank, local_size = env.get("LOCAL_RANK", hosts[:rank].count(host)), hosts.count(host)
    node, nodes = names.index(host), len(names)
    parts = dict(part.split(":") for part in dist.get_backend_config().split(","))
    distinct = set(parts.values())
    backend = dist.get_backend_config() if len(distinct) > 1 else distinct.pop()
    kinds = [kind for kind, name in parts.items() if not _device.supports_device(name, "cpu")]
    device = device or torch.device(*kinds or ["cpu"])
    if device.index is None and device.type in {seen.type for seen in _device.visible_devices()}:
        # The device that the group is bound to, else the current one, or the local rank's.
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        device = bound or _device.current_device(local_rank)
    return World(rank, size, local_rank, local_size, node, nodes, device, backend, "existing")


def cpu_group_and_device(world: World) -> tuple[Any, torch.device]:
    """Return the group (None: the default one) and the device for collectives of small numbers."""
    found = group_state()
    if found is not None and found.cpu_group is not None:
        return found.cpu_group, _CPU
    return None, _CPU if _device.supports_device(world.backend, "cpu") else world.device


def cpus_per_rank(local_size: int) -> int:
    """Return the number of CPU cores that each of `local_size` ranks may use, at least 1.

    Ranks of a host that are bound to the same cores share them. All ranks share the quota of the
    container.
    """
    state, quota = group_state(), _device.cgroup_cpu_quota()
    sharers = local_size if state is None else state.cpu_sharers
    cpus = len(_device.cpus_of_process()) // sharers
    return max(1, cpus if quota is None else min(cpus, int(quota / local_size)))


def new_store_client(timeout: timedelta | None, prefix: str = "pardata") -> StoreClient:
    """Return a client of the default group's store, with torch's timeout if none is given."""
    wait = dist.distributed_c10d.default_pg_timeout if timeout is None else timeout
    store = dist.PrefixStore(prefix, _device.default_store())
    return StoreClient(store, wait, dist.get_rank(), dist.get_world_size())
