"""The CPU cores of this rank."""

import os
from contextlib import suppress
from pathlib import Path

from pardata.environment._launchers import launcher_by_name
from pardata.environment._world import World, group_state


def cpus_per_rank(here: World) -> int:
    """Return the number of cores that this rank may use, at least 1.

    The ranks of a host that are bound to the same cores share them, and all the container's quota.
    """
    cpus, state, known = len(cpus_of_process()), group_state(), launcher_by_name(here.launcher)
    if known and known.cores:  # its job may have a part of the machine
        cpus = min(cpus, int(os.environ.get(known.cores, cpus)))
    cpus //= here.local_size if state is None else state.cpu_sharers
    quota = cgroup_cpu_quota()
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
