"""The CPU cores of this rank."""

import os
from contextlib import suppress
from pathlib import Path

from pardata.environment._world import World, group_state


def cpus_per_rank(here: World) -> int:
    """Return the number of cores that this rank may use, at least 1.

    The ranks of a host that are bound to the same cores share them, and all the container's quota.
    """
    state, quota = group_state(), cgroup_cpu_quota()
    cpus = len(cpus_of_process()) // (here.local_size if state is None else state.cpu_sharers)
    return max(1, cpus if quota is None else min(cpus, int(quota / here.local_size)))


def cpus_of_process() -> list[int]:
    """Return the numbers of the cores to which this process is bound, by default of all."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cgroup_cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores that this container may use, if it is limited (cgroup version 2 or 1)."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with suppress(OSError):
            limit, period = " ".join((root / file).read_text() for file in files).split()
            return None if limit in ("max", "-1") else int(limit) / int(period)
    return None
