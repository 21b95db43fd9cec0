"""How many cores this rank may use."""

import os
from pathlib import Path

from pardata.ranks._world import World


def usable_cores(here: World) -> int:
    """Return the cores that this rank may use, at least 1: affinity and quota, shared fairly."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        allowed = os.cpu_count() or 1
    # A launcher that binds each task has given this rank a set of its own; else the ranks share.
    bound = here.launcher in ("slurm", "mpi") and allowed < (os.cpu_count() or 1)
    sharers = 1 if bound else here.local_size
    quota = cpu_quota()
    if quota is not None:
        return max(1, min(allowed // sharers, int(quota / here.local_size)))
    return max(1, allowed // sharers)


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores that this container may use, if it is limited (cgroup version 2 or 1)."""
    try:
        limit, period = (root / "cpu.max").read_text().split()
    except OSError:
        try:
            limit = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if limit in ("max", "-1") else int(limit) / int(period)
