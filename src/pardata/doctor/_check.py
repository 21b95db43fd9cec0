"""`python -m pardata check`: join, all-reduce, measure."""

import socket
import statistics
import timeit

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.collectives._all_reduce import all_reduce_sum
from pardata.doctor._environment import Finding
from pardata.environment._launchers import LaunchInfo
from pardata.environment._world import World, cpus_per_rank, store_client
from pardata.process_group._init import init
from pardata.store._round import exchange
from pardata.testing._run import run

_TIMES_SMALL, _TIMES_LARGE = 200, 5  # repetitions of a measurement
_LARGE = 2**21  # float32 numbers, 8 MiB: takes 0.01 s on one host, 1 s over 100 Mbit/s
_LARGE_ON_GPU = 2**24  # 64 MiB, which is enough to saturate the links between GPUs


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
            raise RuntimeError(
                f"the sum over all ranks must be {right}, but is {got} on rank {world.rank}: take "
                f"its host out, and test its memory and its network"
            )
        node = f"{socket.gethostname()}, node {world.node_rank}, local rank {world.local_rank}"
        return f"{node}, {world.device}, cores: {cpus_per_rank(world)}"

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


def _median_seconds(tensor: Tensor, times: int) -> float:
    """Return the median seconds of an all-reduce of `tensor`, after a first one, which connects."""

    def reduce() -> None:
        dist.all_reduce(tensor)
        tensor[0].item()  # waits until a GPU is done

    return statistics.median(timeit.repeat(reduce, repeat=times + 1, number=1)[1:])
