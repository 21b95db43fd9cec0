"""The checks of `python -m pardata`: the environment of this process, and a trial run."""

import os
import platform
import resource
import shutil
import socket
import statistics
import timeit
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from pardata.collectives._all_reduce import all_reduce_sum
from pardata.environment import _device
from pardata.environment._launchers import Env, LaunchInfo, select_launcher
from pardata.environment._world import World, __version__, cpus_per_rank, store_client
from pardata.process_group._init import init
from pardata.store._round import exchange
from pardata.testing._run import run

_GIB = 2**30
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # a mount point, no temporary file
_TESTED = ("2.11", "2.15")  # versions of torch in CI
_TIMES_SMALL, _TIMES_LARGE = 200, 5  # repetitions of a measurement
_LARGE = 2**21  # float32 numbers, 8 MiB: takes 0.01 s on one host, 1 s over 100 Mbit/s
_LARGE_ON_GPU = 2**24  # 64 MiB, which is enough to saturate the links between GPUs


class Finding(NamedTuple):
    """The result of one check, with a cure if something is wrong."""

    name: str
    text: str
    cure: str = ""


def environment(launch: LaunchInfo, env: Env) -> list[Finding]:
    """Return the findings about this process's launcher, devices, limits and versions."""
    found = [_launcher(launch, env), _gpus(), _cores(launch.local_size)]
    if Path(_SHARED_MEMORY).exists():  # not on macOS and Windows
        usage = shutil.disk_usage(_SHARED_MEMORY)
        found.append(shared_memory(usage.total, usage.free))
    found.append(_open_files())
    text = f"pardata {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    is_newer = torch.__version__ >= f"{_TESTED[-1]}.99"
    cure = f"if something fails, install torch {_TESTED[-1]}, and report it" * is_newer
    return [*found, Finding("versions", f"{text}; tested with torch {' and '.join(_TESTED)}", cure)]


def _launcher(launch: LaunchInfo, env: Env) -> Finding:
    if (chosen := select_launcher(env)) is None:
        return Finding("launcher", "none: a single process")
    text = f"{chosen.name}: world size {launch.size}, to meet at {launch.endpoint}"
    return Finding("launcher", f"{text}; from {', '.join(chosen.variables)}")


def _gpus() -> Finding:
    if (hidden := _device.undetected_gpus()) is not None:
        return Finding("GPUs", *hidden)
    if not (seen := _device.visible_devices()):
        return Finding("GPUs", "none: training runs on the CPU")
    gpus = map(_device.properties_of, seen)
    kinds = Counter(f"{gpu.name}, {gpu.total_memory / _GIB:.0f} GiB" for gpu in gpus)
    found = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    return Finding("GPUs", f"{found}; backend {_device.backend_for(seen[0])}")


def _cores(local_size: int) -> Finding:
    allowed, quota = cpus_per_rank(1), _device.cgroup_cpu_quota()
    limit = "" if quota is None else f", with a quota of {quota:g}"
    if local_size > allowed:
        text = f"{local_size} ranks of this host share {allowed}{limit}"
        cure = f"start at most {allowed} per host, or ask the scheduler for more cores"
        return Finding("cores", text, cure)
    return Finding("cores", f"{cpus_per_rank(local_size)} per process, of {os.cpu_count()}{limit}")


def shared_memory(total: int, free: int) -> Finding:
    """Return the finding about shared memory of `total` bytes, of which `free` are free."""
    if free >= _GIB:  # a few batches fill a container's default of 64 MB
        # Without the free bytes, which change.
        return Finding(_SHARED_MEMORY, f"{total / _GIB:.1f} GiB")
    cure = "start the container with --shm-size=8g or --ipc=host, or pass num_workers=0"
    text = f"{free / 2**20:.0f} MiB free of {total / _GIB:.1f} GiB"
    return Finding(_SHARED_MEMORY, text, cure)


def _open_files() -> Finding:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    cure = "ulimit -n $(ulimit -Hn): each tensor that a worker hands over takes one"
    text = "no limit" if most == resource.RLIM_INFINITY else f"at most {most}"
    return Finding("open files", text, cure if 0 <= most < 1024 else "")  # most systems' default


def check(launch: LaunchInfo, timeout: float) -> list[Finding]:
    """All-reduce and measure, on the processes of a launcher, or else on two; return the findings.

    Collective under a launcher. An error is raised on every rank.
    """
    if launch.size > 1:
        with init(timeout=timeout, tune_cpu=False) as world:
            return _smoke_test(world)
    # On CPUs, because only a launcher assigns GPUs to processes.
    return run(_as_rank, world_size=2, timeout=timeout)[0]


def _as_rank() -> list[Finding]:
    return _smoke_test(init(device="cpu", tune_cpu=False))


def _smoke_test(world: World) -> list[Finding]:
    found = [Finding("joining", f"{world.size} ranks met, backend {world.backend}")]
    got, right = all_reduce_sum(world.rank + 1), world.size * (world.size + 1) // 2

    def describe() -> str:
        if got != right:
            msg = f"the sum must be {right}, but is {got} on rank {world.rank}: test its host"
            raise RuntimeError(msg)
        node = f"{socket.gethostname()}, node {world.node_rank}, local rank {world.local_rank}"
        return f"{node}, {world.device}, cores: {cpus_per_rank(world.local_size)}"

    # An error on one rank is raised on all.
    places: list[str] = exchange(store_client(), "pardata check", describe, list)
    found += [Finding(f"rank {rank}", place) for rank, place in enumerate(places)]
    found.append(Finding("all-reduce", "correct"))
    seconds = _median_seconds(torch.zeros(1, device=world.device), _TIMES_SMALL)
    numbers = _LARGE if world.device.type == "cpu" else _LARGE_ON_GPU
    tensor = torch.zeros(numbers, device=world.device)
    rate = tensor.nbytes / _median_seconds(tensor, _TIMES_LARGE)
    latency = f"{seconds * 1e6:.0f} microseconds to all-reduce one number"
    bandwidth = f"{rate / 1e6:.0f} MB/s to all-reduce {tensor.nbytes / 2**20:.0f} MiB"
    return [*found, Finding("latency", latency), Finding("bandwidth", bandwidth)]


def _median_seconds(tensor: torch.Tensor, times: int) -> float:
    """Return the median seconds of an all-reduce of `tensor`, after a first one, which connects."""

    def reduce() -> None:
        dist.all_reduce(tensor)
        tensor[0].item()  # waits until a GPU is done

    return statistics.median(timeit.repeat(reduce, repeat=times + 1, number=1)[1:])
