"""Joining the process group of whatever launched this process. Only `init` joins."""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from pardata._validation import checked_timeout
from pardata.environment._backend import new_gloo_group, sends_numbers_apart, timeout_of
from pardata.environment._device import named_device, visible_devices
from pardata.environment._launchers import Launch, detect
from pardata.environment._logger import get_logger
from pardata.environment._world import (
    Joined,
    World,
    current_world,
    existing_world,
    inherits,
    is_child,
    joined,
    new_channel,
)
from pardata.process_group._malloc import keep_freed_memory
from pardata.process_group._rendezvous import join, once_made, with_fresh_part
from pardata.process_group._shutdown import remember, report_uncaught, tell_at_the_end
from pardata.process_group._watchdog import Watch
from pardata.store._caller import call_site
from pardata.store._remote_error import leave_for_torchrun, one_line
from pardata.store._round import all_say

_log = get_logger(__name__)

_LEAST_HANG = timedelta(minutes=1)


def init(
    *,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    device: torch.device | str | None = None,
    tune_cpu: bool = True,
    hang_after: timedelta | float | None = None,
) -> World:
    """Join the process group of whatever launched this process and return what was found.

    `init` looks for launchers in this order: a process group that already exists (Ray Train, your
    own), torchrun, Open MPI, a SLURM step, MPICH, none. ``PARDATA_LAUNCHER`` (``auto``,
    ``torchrun``, ``slurm``, ``mpi``, ``none``) overrides that. A single process never needs `init`.
    Called there, it makes a group of one, for strategies that need a group.

    `init` adopts a group that exists, and never leaves it. Its GPU is the one to which the group is
    bound, or else the current one, or else the local rank's, which becomes current.

    Idempotent. Collective: every rank calls it. Usable as ``with init() as world:``, which leaves
    the group at the end. Without that the process leaves it when it exits normally. DataLoader
    workers and forked children get the single-process world and never touch the group.

    With several processes, every rank logs an uncaught exception in one line, which says which rank
    failed first. So it does for one that leaves the block of ``with init()``, and is caught outside
    of it. Ranks that wait for this one learn of it. If nobody catches it the previous
    ``sys.excepthook`` runs then, which is restored when the group ends.

    Args:
        backend: of ``torch.distributed``; ``cuda:nccl,cpu:gloo`` on a GPU and ``gloo`` on a CPU by
            default.
        timeout: of the group's collectives and of joining, in seconds or a `timedelta`; PyTorch's
            default if not given.
        device: where to compute; by default the GPU of this local rank, else the CPU.
        tune_cpu: on a CPU, under glibc, tell the allocator to keep freed memory. Results do not
            change. A step of a small convolutional net or an LSTM takes 0.6 to 0.7 of its time in
            one process. A wide MLP or ResNet-18 takes 0.9, a transformer 0.95 to 1. Peak memory
            grows by up to 15 %. ``PARDATA_TUNE_CPU=0`` switches it off from outside.
        hang_after: seconds or a `timedelta`. If a rank waits so long for others, or for a step
            of a loader, a table in the log tells where each rank is. The default is a
            tenth of the group's timeout, at least a minute; 0 turns it off. Nothing is stopped.

    Raises:
        ValueError: launcher variables are partial or contradictory.
        RuntimeError: a rank cannot take part, because it has no GPU left or shares one. Or the
            address does not resolve, or the port is taken. Or a subprocess inherited the variables
            of a rank. It comes on every rank.
        TimeoutError: ranks did not come; it names them.

    >>> with init() as world:
    ...     world.rank, world.size
    (0, 1)
    """
    try:
        patience = None if timeout is None else checked_timeout(timeout)
        if hang_after is not None:
            hang_after = checked_timeout(hang_after, "hang_after", or_none=True)
        here, before = current_world(), joined()
        if here.backend is None and (is_child() or dist.group.WORLD is not None):
            return here  # there is a group, which a child, or who opted out, does not touch
        if before is not None:
            _refuse_change(before.world, backend, device)
            return replace(before.world, _at_the_end=None)
        if dist.group.WORLD is not None:
            ours = _adopt(device, patience)
        else:
            launch = detect(os.environ)
            _refuse_inherited(launch)
            ours = join(launch, backend=backend, timeout=patience, device=device)
        with suppress(ValueError):  # who made the group need not have used a launcher's variables
            os.environ["PARDATA_JOINED"] = f"{os.getpid()} {detect(os.environ).identity}"
        if ours.world.size > 1:
            ours.on_leaving = _looked_after(ours, hang_after)
        remember(ours)
    except Exception as error:
        leave_for_torchrun(f"{one_line(error)} ({call_site()})")  # there is no hook yet that would
        raise
    _log.info("%s", _found_text(ours.world))
    wants = tune_cpu and os.environ.get("PARDATA_TUNE_CPU") != "0"
    if ours.world.device.type == "cpu" and wants and keep_freed_memory():
        _log.debug("the allocator keeps freed memory, unless PARDATA_TUNE_CPU=0", once=True)
    return ours.world


def _looked_after(ours: Joined, hang_after: timedelta | None) -> Callable[[], None]:
    """Tell of exceptions and hangs from now on; return what ends that."""
    ends = ExitStack()
    ends.callback(report_uncaught(ours.group))
    if hang_after is None:
        hang_after = max(ours.channel.timeout / 10, _LEAST_HANG)
    if hang_after:
        ends.callback(Watch(ours.channel, hang_after.total_seconds()).end)
    return ends.close


def _adopt(device: torch.device | str | None, timeout: timedelta | None) -> Joined:
    channel, counts = with_fresh_part(new_channel(timeout)), None

    def world_of(hosts: Sequence[str] = ()) -> World:
        return existing_world(None if device is None else named_device(device), hosts)

    def arrive() -> tuple[str, bool]:
        return socket.gethostname(), sends_numbers_apart(world_of().backend, world_of().device)

    hosts, apart = zip(*all_say(channel, "init", arrive, list), strict=True)
    here = replace(world_of(hosts), _at_the_end=tell_at_the_end)
    if here.device in visible_devices():
        torch.accelerator.set_device_index(here.device)
    if here.size > 1 and not all(apart):
        patience = timeout or timeout_of(dist.group.WORLD) or channel.timeout
        counts = once_made(channel, partial(new_gloo_group, patience))
    return Joined(here, channel, group_of_counts=counts)


def _refuse_inherited(launch: Launch) -> None:
    if launch.size > 1 and (pid := inherits(launch)):
        raise RuntimeError(
            f"this process inherited the variables of rank {launch.rank}, which process {pid} has "
            f"joined as: start it with PARDATA_LAUNCHER=none to run alone, or with its own launcher"
        )


def _refuse_change(joined: World, backend: str | None, wanted: torch.device | str | None) -> None:
    device = None if wanted is None else named_device(wanted)
    # A kind without a number asks for this rank's GPU, whichever that is.
    same = device in (None, joined.device, torch.device(joined.device.type))
    if not same or backend not in (None, joined.backend):
        raise RuntimeError(
            f"`init` has already joined with backend={joined.backend!r} and "
            f"device={str(joined.device)!r}, but is now asked for backend={backend!r} and "
            f"device={str(device)!r}: pass them to the first call"
        )


def _found_text(here: World) -> str:
    nodes = f"{here.num_nodes} node{'s' if here.num_nodes > 1 else ''}"
    processes = f"{here.size} process{'es' if here.size > 1 else ''}"
    known = {"existing": "group already there", "single": "no launcher"}
    launcher = known.get(here.launcher, f"launched by {here.launcher}")
    gpus = f" of {len(visible_devices())} GPU(s)" if here.device.type != "cpu" else ""
    device = f"device {here.device}{gpus} on {socket.gethostname()}"
    return f"this run has {processes} on {nodes}, {launcher}, backend {here.backend}, {device}"
