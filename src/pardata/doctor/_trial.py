"""A trial run: reduce, measure, and hand over a tensor through shared memory."""

import statistics
import time
import timeit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from pardata.collective._reduction import all_reduce_sum
from pardata.data._workers import choose_workers
from pardata.doctor._finding import Finding, found_error
from pardata.launch._init import init
from pardata.ranks._world import World
from pardata.testing._run import run

NETWORK_CURE = (
    "is every port open between the hosts? GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME for GPUs) names "
    "the interface to use"
)
_TIMES_SMALL, _TIMES_LARGE = 200, 5  # how often a measure is taken
_LARGE = 2**21  # numbers, 8 MiB: a hundredth of a second on one host, a second on 100 Mbit/s
_LARGE_ON_GPU = 2**24  # 64 MiB: less does not fill the links between GPUs
_SAMPLE = 2**20  # 4 MiB that a worker hands over


def trial(here: World, timeout: float) -> list[Finding]:
    """Return what came of each step of the trial on this rank; the measures are rank 0's.

    Collective. What fails ends it, for the group is then of no use.
    """
    findings = []
    try:
        findings.append(_all_reduce(here))
        measures = _measures(here)
        findings += measures if here.is_main else []
        findings.append(_worker(here, timeout))
    except Exception as error:  # noqa: BLE001  # whatever goes wrong is what is looked for
        findings.append(found_error("trial", error, NETWORK_CURE))
    return findings


def trial_of_two(timeout: float) -> list[Finding]:
    """Start two processes here, and return what came of their trial."""
    began = time.monotonic()
    try:
        first, second = run(_as_rank, timeout, world_size=2, timeout=timeout)
    except Exception as error:  # noqa: BLE001  # whatever goes wrong is what is looked for
        return [found_error("two processes", error, NETWORK_CURE)]
    seconds = time.monotonic() - began
    text = f"started, joined and left, in {seconds:.1f} s, on the CPU"
    # Two processes cannot share a GPU under NCCL, and to which it belongs is a launcher's task.
    gpus = torch.cuda.device_count()
    if gpus > 1:
        text += f"; to try GPUs: torchrun --nproc-per-node={gpus} -m pardata check"
    return list(dict.fromkeys([Finding("two processes", text), *first, *second]))


def _as_rank(timeout: float) -> list[Finding]:
    return trial(init(device="cpu", tune_cpu=False), timeout)


def _all_reduce(here: World) -> Finding:
    got, right = all_reduce_sum(here.rank + 1), here.size * (here.size + 1) // 2
    if got == right:
        return Finding("all-reduce", "correct")
    text = f"the sum over all ranks must be {right}, but is {got}"
    cure = "take this host out and test its memory and its network"
    return Finding("all-reduce", text, cure, is_error=True)


def _measures(here: World) -> list[Finding]:
    seconds = _median_seconds(torch.zeros(1, device=here.device), _TIMES_SMALL)
    numbers = _LARGE_ON_GPU if here.device.type == "cuda" else _LARGE
    tensor = torch.zeros(numbers, device=here.device)
    rate = tensor.nbytes / _median_seconds(tensor, _TIMES_LARGE)
    latency = f"{seconds * 1e6:.0f} microseconds to all-reduce one number"
    bandwidth = f"{rate / 1e6:.0f} MB/s to all-reduce {tensor.nbytes / 2**20:.0f} MiB"
    return [Finding("latency", latency), Finding("bandwidth", bandwidth)]


def _median_seconds(tensor: Tensor, times: int) -> float:
    """Return how long an all_reduce of `tensor` takes, after one that connects."""

    def reduce() -> None:
        dist.all_reduce(tensor)
        tensor[0].item()  # waits for a GPU

    return statistics.median(timeit.repeat(reduce, repeat=times + 1, number=1)[1:])


def _worker(here: World, timeout: float) -> Finding:
    """Take a tensor from a DataLoader's worker."""
    try:
        choose_workers(1, None, here)  # raises where a worker could not send it
        samples = [torch.ones(_SAMPLE)]
        (sample,) = DataLoader(samples, batch_size=None, num_workers=1, timeout=timeout)  # type: ignore[arg-type]  # a list is a dataset
    except (RuntimeError, ValueError) as error:
        cure = "make /dev/shm larger (docker run --shm-size=8g) and writable, or pass num_workers=0"
        return found_error("shared memory", error, cure)
    return Finding("shared memory", f"a worker handed over {sample.nbytes / 2**20:.0f} MiB")
