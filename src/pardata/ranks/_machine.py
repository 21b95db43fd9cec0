"""This machine: the cores that a rank may use, and the GPUs that torch sees, or should see."""

import os
import warnings
from contextlib import suppress
from pathlib import Path

import torch

from pardata.ranks._world import World


def usable_cores(here: World) -> int:
    """Return the cores that this rank may use, at least 1: affinity and quota, shared fairly."""
    allowed = everyones = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        allowed = len(os.sched_getaffinity(0))
    if here.launcher == "slurm":  # whose job may have a part of the machine
        everyones = min(everyones, int(os.environ.get("SLURM_CPUS_ON_NODE", everyones)))
    # A launcher that binds each task has given this rank a set of its own; else the ranks share.
    bound = here.launcher in ("slurm", "mpi") and allowed < everyones
    share = allowed if bound else min(allowed, everyones) // here.local_size
    quota = cpu_quota()  # of the container, for all its ranks
    return max(1, share if quota is None else min(share, int(quota / here.local_size)))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores that this container may use, if it is limited (cgroup version 2 or 1)."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with suppress(OSError):
            limit, period = " ".join((root / file).read_text() for file in files).split()
            return None if limit in ("max", "-1") else int(limit) / int(period)
    return None


def visible_gpus() -> int:
    """Return how many GPUs torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def hidden_gpus(root: Path = Path("/")) -> tuple[str, str] | None:
    """Return that torch sees none of the GPUs that are here, and the cure, where that is so."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # torch warns of a driver that is too old
        if visible_gpus():
            return None
    # A container that was started without them has no device files, but the driver's folder.
    folders = {"dev": "nvidia[0-9]*", "proc/driver/nvidia/gpus": "*"}
    found = {f"/{name}": len(list((root / name).glob(one))) for name, one in folders.items()}
    where = max(found, key=lambda name: found[name])
    if not found[where] and not said:
        return None
    text = f"torch sees none of {found[where]} in {where}{f' ({said[0].message})' if said else ''}"
    mask = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    cure = (
        f"install a torch for CUDA (this one is for {torch.version.cuda or 'the CPU only'}), unset "
        f"CUDA_VISIBLE_DEVICES (it is {mask!r}), start the container with --gpus=all, or see with "
        f"nvidia-smi whether the driver is new enough"
    )
    return text, cure
