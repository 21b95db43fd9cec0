"""This machine: the cores that a rank may use, and what another process of it does."""

import os
from contextlib import suppress
from pathlib import Path

from pardata.environment._launchers import named
from pardata.environment._world import World


def usable_cores(here: World) -> int:
    """Return the cores that this rank may use, at least 1: affinity and quota, shared fairly."""
    allowed = everyones = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        allowed = len(os.sched_getaffinity(0))
    known = named(here.launcher)
    if known and known.cores:  # its job may have a part of the machine
        everyones = min(everyones, int(os.environ.get(known.cores, everyones)))
    # A launcher that binds each task has given this rank a set of its own; else the ranks share.
    bound = known is not None and known.cores is not None and allowed < everyones
    share = allowed if bound else min(allowed, everyones) // here.local_size
    quota = cpu_quota()  # the container's, for all its ranks
    return max(1, share if quota is None else min(share, int(quota / here.local_size)))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores that this container may use, if it is limited (cgroup version 2 or 1)."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with suppress(OSError):
            limit, period = " ".join((root / file).read_text() for file in files).split()
            return None if limit in ("max", "-1") else int(limit) / int(period)
    return None


def state_of(pid: int) -> str:
    """Say what a process of this machine does that does not answer."""
    state = "?"
    with suppress(OSError):  # there is no such file on macOS
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        state = "Z"  # as of one that its parent has not asked after
    except PermissionError:
        pass
    states = {"Z": "is gone", "X": "is gone", "T": "is stopped", "t": "is stopped"}
    return states.get(state, "lives, but runs no Python: C code in it may hold the GIL")
