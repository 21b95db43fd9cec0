"""`python -m pardata env`: the launcher, the machine's devices and limits, what is installed."""

import os
import platform
import resource
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from pardata.environment import _device
from pardata.environment._launchers import LaunchInfo, select_launcher
from pardata.environment._version import __version__
from pardata.environment._world import World, cpus_per_rank

_GIB = 2**30
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # a mount point, no temporary file
_LEAST_SHARED_MEMORY = _GIB  # a few batches fill a container's default of 64 MB
_FEWEST_FILES = 1024  # the default of most systems; each tensor sent by a worker takes one


class Finding(NamedTuple):
    """The result of one check, with a cure if something is wrong."""

    name: str
    text: str
    cure: str = ""


def environment(launch: LaunchInfo, env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings about this process's launcher, devices, limits and versions."""
    nodes = launch.num_nodes or -(-launch.size // launch.local_size)
    world = World(*launch[1:5], 0, nodes, torch.device("cpu"), None, launch.launcher)
    yield from (_launcher(launch, env), _gpus(), _cores(world))
    if Path(_SHARED_MEMORY).exists():  # not on macOS and Windows
        usage = shutil.disk_usage(_SHARED_MEMORY)
        yield shared_memory(usage.total, usage.free)
    yield from _open_files()
    versions = f"pardata {__version__}, torch {torch.__version__}"
    yield Finding("versions", f"{versions}, Python {platform.python_version()}")


def _launcher(launch: LaunchInfo, env: Mapping[str, str]) -> Finding:
    if (chosen := select_launcher(env)) is None:
        return Finding("launcher", "none: a single process")
    names = ", ".join(chosen.variables)
    text = f"{chosen.name}: world size {launch.size}, to meet at {launch.endpoint}; from {names}"
    return Finding("launcher", text)


def _gpus() -> Finding:
    if (hidden := _device.undetected_gpus()) is not None:
        return Finding("GPUs", *hidden)
    if not (seen := _device.visible_devices()):
        return Finding("GPUs", "none: training runs on the CPU")
    gpus = map(_device.properties_of, seen)
    kinds = Counter(f"{gpu.name}, {gpu.total_memory / _GIB:.0f} GiB" for gpu in gpus)
    found = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    return Finding("GPUs", f"{found}; backend {_device.backend_for(seen[0])}")


def _cores(world: World) -> Finding:
    allowed, quota = cpus_per_rank(replace(world, local_size=1)), _device.cgroup_cpu_quota()
    limit = "" if quota is None else f", with a quota of {quota:g}"
    if world.local_size > allowed:
        text = f"{world.local_size} ranks of this host share {allowed}{limit}"
        cure = f"start at most {allowed} per host, or ask the scheduler for more cores"
        return Finding("cores", text, cure)
    return Finding("cores", f"{cpus_per_rank(world)} per process, of {os.cpu_count()}{limit}")


def shared_memory(total: int, free: int) -> Finding:
    """Return the finding about shared memory of `total` bytes, of which `free` are free."""
    if free >= _LEAST_SHARED_MEMORY:
        # Without the free bytes, which change.
        return Finding(_SHARED_MEMORY, f"{total / _GIB:.1f} GiB")
    cure = (
        "workers hand batches over there: start the container with --shm-size=8g or --ipc=host, "
        "remove what other runs have left there, or pass num_workers=0"
    )
    text = f"{free / 2**20:.0f} MiB free of {total / _GIB:.1f} GiB"
    return Finding(_SHARED_MEMORY, text, cure)


def _open_files() -> Iterator[Finding]:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    cure = "ulimit -n $(ulimit -Hn): each tensor that a worker hands over takes one"
    text = "no limit" if most == resource.RLIM_INFINITY else f"at most {most}"
    yield Finding("open files", text, cure if 0 <= most < _FEWEST_FILES else "")
