"""A trial run: reduce, broadcast, measure, and hand over a tensor through shared memory."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pardata.collective._reduction import all_reduce_sum
from pardata.doctor._finding import OK, WARNING, Finding, found_error
from pardata.launch._init import init
from pardata.ranks._launcher import TORCHRUN, Launch
from pardata.ranks._world import World
from pardata.testing._run import run

_SMALL, _TIMES_SMALL = 1, 200  # numbers, and how often
_LARGE, _TIMES_LARGE = 2**21, 5  # 8 MiB: a hundredth of a second on one host, a second on 100 Mbit
_LARGE_ON_GPU = 2**24  # 64 MiB: less does not fill the links between GPUs
_SAMPLE = 2**20  # 4 MiB that a worker hands over
_NETWORK_CURE = (
    "is every port open between the hosts? GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME for GPUs) names "
    "the interface to use"
)


def trial(here: World, timeout: float) -> Iterator[Finding]:
    """Yield what came of each step of the trial on this rank. Collective.

    The measures come from rank 0 only. A collective that fails raises, for the group is then of no
    use; `trial_error` makes a finding of it.
    """
    yield _sum(here)
    yield _broadcast(here)
    measures = [_latency(here), _bandwidth(here)]
    if here.is_main:
        yield from measures
    yield _worker(timeout)


def trial_error(name: str, error: BaseException) -> Finding:
    """Return the finding that an error of joining or of the trial is."""
    return found_error(name, error, _NETWORK_CURE)


def trial_of_two(timeout: float) -> list[Finding]:
    """Start two processes here, as a launcher would, and return what came of their trial."""
    # As torchrun's agent does: the port is whatever the system gives.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    began = time.monotonic()
    try:
        accounts = run(_as_rank, store.port, timeout, world_size=2, timeout=timeout)
    except Exception as error:  # noqa: BLE001  # whatever goes wrong is what is looked for
        return [trial_error("two processes", error)]
    seconds = time.monotonic() - began
    text = f"started, met over TCP on the CPU and left, in {seconds:.1f} s"
    return [
        Finding("two processes", OK, text),
        *_untried_gpus(),
        *accounts[0],
        *(finding for finding in accounts[1] if finding not in accounts[0]),
    ]


def _untried_gpus() -> Iterator[Finding]:
    # Two processes cannot share one under NCCL, and which of several to take is a launcher's task.
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > 1:
        command = f"torchrun --standalone --nproc-per-node={count} -m pardata check"
        yield Finding("GPUs", OK, f"not tried: {command} does")


def _as_rank(port: int, timeout: float) -> list[Finding]:
    """Join as one of two ranks that torchrun started, in place of the group of `run`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    values = (rank, size, rank, size, "127.0.0.1", port)
    os.environ.update(zip(TORCHRUN, map(str, values), strict=True))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    here = init(device="cpu", timeout=timedelta(seconds=timeout), tune_cpu=False)
    return list(trial(here, timeout))


def rendezvous(launch: Launch, here: World, seconds: float) -> Finding:
    """Return the finding that all ranks have joined."""
    hosts = f"{here.num_nodes} host{'s' if here.num_nodes > 1 else ''}"
    where = f"{launch.master_addr}:{launch.master_port}"
    text = f"{here.size} ranks on {hosts} met at {where} in {seconds:.1f} s, backend {here.backend}"
    return Finding("joining", OK, text)


def _sum(here: World) -> Finding:
    right = here.size * (here.size + 1) // 2
    return agreement("sum", all_reduce_sum(here.rank + 1), right)


def _broadcast(here: World) -> Finding:
    sent = torch.arange(1000.0, device=here.device)
    got = sent if here.is_main else torch.zeros_like(sent)
    dist.broadcast(got, src=0)
    return agreement("broadcast", got.sum().item(), sent.sum().item())


def agreement(name: str, got: float, right: float) -> Finding:
    """Return whether the ranks computed what they should."""
    if got == right:
        return Finding(name, OK, "right")
    msg = (
        f"the result must be {right}, but is {got}: take this host out and test its memory and its "
        f"network"
    )
    return found_error(name, ArithmeticError(msg), "")


def _latency(here: World) -> Finding:
    seconds = _median_seconds(torch.zeros(_SMALL, device=here.device), _TIMES_SMALL)
    text = f"{seconds * 1e6:.0f} microseconds for the sum of one number"
    return Finding("latency", OK, text, value=seconds)


def _bandwidth(here: World) -> Finding:
    numbers = _LARGE_ON_GPU if here.device.type == "cuda" else _LARGE
    tensor = torch.zeros(numbers, device=here.device)
    size = tensor.nbytes
    rate = size / _median_seconds(tensor, _TIMES_LARGE)
    text = f"{rate / 1e6:.0f} MB/s for the sum of {size / 2**20:.0f} MiB"
    return Finding("bandwidth", OK, text, value=rate)


def _median_seconds(tensor: Tensor, times: int) -> float:
    """Return how long an all_reduce of `tensor` takes, after one that connects."""
    wait: Callable[[], None] = torch.cuda.synchronize if tensor.is_cuda else lambda: None
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        wait()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


class _Made(Dataset[Tensor]):
    """One large sample that says which process made it."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((_SAMPLE,), os.getpid() + index, dtype=torch.int32)


def _worker(timeout: float) -> Finding:
    """Take a tensor from a DataLoader's worker, and look whether anything of it stays behind."""
    name = "shared memory"
    try:
        (sample,) = DataLoader(_Made(), batch_size=None, num_workers=1, timeout=timeout)
    except RuntimeError as error:
        cure = "make /dev/shm larger (docker run --shm-size=8g), or pass num_workers=0"
        return found_error(name, error, cure)
    pids = sample.unique().tolist()
    if len(pids) != 1 or pids[0] == os.getpid():
        return agreement(name, pids[0], os.getpid())
    left = left_behind(pids[0], Path("/dev/shm"))  # noqa: S108  # where it is
    if left:
        text = f"a worker's tensor came, but {', '.join(left)} is left in /dev/shm"
        return Finding(name, WARNING, text, f"rm /dev/shm/torch_{pids[0]}_*")
    return Finding(name, OK, f"{sample.nbytes / 2**20:.0f} MiB came from a worker, nothing is left")


def left_behind(pid: int, directory: Path) -> list[str]:
    """Return the files that torch made in `directory` for process `pid`."""
    return sorted(path.name for path in directory.glob(f"torch_{pid}_*"))
