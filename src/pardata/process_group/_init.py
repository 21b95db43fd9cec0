"""`init`: joins or adopts the process group of this process."""

import ctypes
import multiprocessing
import os
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from threading import Timer, current_thread
from typing import Any

import torch
import torch.distributed as dist

from pardata._validation import to_timedelta
from pardata.environment._launchers import SINGLE, LaunchInfo, detect_launch, unread_variable
from pardata.environment._logger import get_logger
from pardata.environment._world import GroupState, World, current_world, group_state, is_child
from pardata.process_group._rendezvous import Device, form_group
from pardata.process_group._shutdown import install_excepthook, register_state
from pardata.process_group._watchdog import Watchdog

_log = get_logger(__name__)

_LEAST_HANG = timedelta(minutes=1)
# Parameters of mallopt(3), by their numbers in glibc's malloc.h, and the best values measured.
# M_MMAP_MAX: large blocks come from the heap, not from a mapping of their own. M_TRIM_THRESHOLD:
# keep the heap's top. M_TOP_PAD: grow the heap in large steps.
_MALLOC_OPTIONS = {-4: 0, -1: 2**31 - 1, -2: 64 * 2**20}


def init(
    *,
    backend: str | None = None,
    timeout: timedelta | float | None = None,
    device: torch.device | str | None = None,
    tune_cpu: bool = True,
    hang_after: timedelta | float | None = None,
) -> World:
    """Join the launcher's process group, and return this process's `World`.

    `init` uses a process group that already exists (Ray Train, your own). Otherwise it looks for
    launchers in this order: torchrun, Open MPI, submitit's local executor, Flux, a SLURM step,
    MVAPICH2, jsrun, Horovod, PALS, MPICH, none. ``PARDATA_LAUNCHER`` (``auto``, ``torchrun``,
    ``slurm``, ``mpi``, ``submitit``, ``flux``, ``horovod``, ``none``) overrides that. A single
    process never needs `init`. Called there, it makes a group of one, for strategies that need a
    group. It warns in a child of ``multiprocessing``, and where other variables suggest several
    processes.

    `init` adopts a group that exists, and never leaves it. Its GPU is the one to which the group is
    bound, or else the current one, or else the local rank's, which becomes current.

    Idempotent. Collective: every rank calls it. ``with init() as world:`` leaves the group at the
    end of the block. Otherwise the process leaves the group when it exits normally. DataLoader
    workers and forked children get the single-process world and never touch the group.

    With several processes, every rank logs an uncaught exception in one line, which says which rank
    failed first. The same holds for an exception that leaves the block of ``with init()``. Ranks
    that wait for this rank raise an error. An uncaught exception then reaches the previous
    ``sys.excepthook``, which is restored when the group ends.

    Args:
        backend: of ``torch.distributed``; ``cuda:nccl,cpu:gloo`` on a GPU and ``gloo`` on a CPU by
            default.
        timeout: of the group's collectives and of joining, in seconds or a `timedelta`; PyTorch's
            default if not given.
        device: where to compute; by default the GPU of this local rank, else the CPU.
        tune_cpu: on a CPU, under glibc, let the allocator keep freed memory. Results do
            not change. Small convolutional nets train faster (``benchmarks/epoch.py``).
            Peak memory grows, and with batches of many lengths to a multiple.
            ``PARDATA_TUNE_CPU=0`` turns it off from outside.
        hang_after: seconds or a `timedelta`. If a rank waits so long for others, or for a step of a
            loader, a table in the log shows where each rank is. The default is a tenth of
            `timeout`, at least a minute, and three minutes without one; 0 turns it off. Nothing is
            stopped, but on an accelerator a rank that waits for one that has failed. `init` itself
            logs where the ranks were to meet.

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
    patience = None if timeout is None else to_timedelta(timeout)
    if hang_after is not None:
        hang_after = to_timedelta(hang_after, "hang_after", or_none=True)
    world, before = current_world(), group_state()
    if world.backend is None and (is_child() or dist.group.WORLD is not None):
        return world  # a child, and `PARDATA_LAUNCHER=none`, leave the group alone
    if before is not None:
        given = dict[str, object](backend=backend, timeout=patience, hang_after=hang_after)
        _check_same_arguments(before, device, given)
        before.client.thread = current_thread()
        return replace(before.world, _at_the_end=None)
    launch = detect_launch(os.environ) if dist.group.WORLD is None else None
    if launch is not None:
        _check_not_inherited(launch)
        _warn_if_alone(launch)
    default = max((patience or dist.distributed_c10d.default_pg_timeout) / 10, _LEAST_HANG)
    hang_after = default if hang_after is None else hang_after
    which = launch.launch_id if launch else "a group that was there"
    text = "init (%s) still waits for other ranks: were all started, and can they reach each other?"
    warns = Timer(hang_after.total_seconds(), _log.warning, [text, which])
    if hang_after:
        warns.start()
    try:
        state = form_group(launch, backend=backend, timeout=patience, device=device)
    finally:
        warns.cancel()
    # An adopted group may have been created without a launcher's variables.
    with suppress(ValueError):
        os.environ["PARDATA_JOINED"] = f"{os.getpid()} {detect_launch(os.environ).launch_id}"
    register_state(state)
    install_excepthook(state)
    world, state.hang_after, state.client.thread = state.world, hang_after, current_thread()
    if hang_after:
        state.resources.callback(Watchdog(state, hang_after.total_seconds()).stop)
    text = "joined: world size %d, nodes %d, launcher %s, backend %s, device %s on %s"
    sizes = world.size, world.num_nodes, world.launcher
    _log.info(text, *sizes, world.backend, world.device, socket.gethostname())
    wants = tune_cpu and os.environ.get("PARDATA_TUNE_CPU") != "0"
    if world.device.type == "cpu" and wants and tune_glibc_malloc():
        _log.debug("the allocator keeps freed memory, unless PARDATA_TUNE_CPU=0", once=True)
    return world


def _warn_if_alone(launch: LaunchInfo) -> None:
    """Warn, in a world of one, of signs that other processes were meant to join."""
    started = multiprocessing.parent_process() is not None
    sign = "multiprocessing started it" if started else unread_variable(os.environ)
    if launch is not SINGLE or not sign or os.environ.get("PARDATA_LAUNCHER") == "none":
        return
    text = (
        "this process is alone, a single process of world size 1, but %s: to join others, call "
        "torch.distributed.init_process_group before init(), or set RANK, WORLD_SIZE, LOCAL_RANK, "
        "LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start the script with torchrun; to run "
        "alone, set PARDATA_LAUNCHER=none"
    )
    _log.warning(text, sign if started else f"{sign} is set", ranks="all", once=True)


def _check_not_inherited(launch: LaunchInfo) -> None:
    """Raise if another process has joined as the rank that the variables name."""
    pid, _, identity = os.environ.get("PARDATA_JOINED", "").partition(" ")
    if launch.size == 1 or identity != launch.launch_id or pid == str(os.getpid()):
        return
    msg = f"this process inherited the variables of rank {launch.rank}, which process {pid} is: "
    msg += "set PARDATA_LAUNCHER=none for it, or put the script under `if __name__ == '__main__':`"
    raise RuntimeError(msg)


def _check_same_arguments(state: GroupState, device: Device, given: dict[str, object]) -> None:
    """Raise if arguments of a second `init` differ from those of the first."""
    world, wanted = state.world, None if device is None else torch.device(device)
    # A device type without an index is this rank's GPU.
    given["device"] = None if wanted == torch.device(world.device.type) else wanted
    had = {"backend": world.backend, "device": world.device, "timeout": state.client.timeout}
    for name, found in {**had, "hang_after": state.hang_after}.items():
        if given[name] not in (None, found):
            raise RuntimeError(
                f"`{name}` must be {str(found)!r}, as in the first init(), not {str(given[name])!r}"
            )


def tune_glibc_malloc() -> bool:
    """Stop malloc from returning freed memory to the kernel; return whether that took effect.

    By default each activation of a training step is mapped, faulted in page by page, zeroed by the
    kernel and unmapped again, step after step. It lasts until the process ends. Without glibc it
    does nothing.
    """
    libc: Any = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if not hasattr(libc, "gnu_get_libc_version"):  # musl has no mallopt
        return False
    return all(libc.mallopt(name, value) == 1 for name, value in _MALLOC_OPTIONS.items())
