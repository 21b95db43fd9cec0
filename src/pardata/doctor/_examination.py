"""`python -m pardata env` and `check`: look, try, let the ranks report to rank 0, print.

Whatever goes wrong becomes a finding, on every rank.
"""

import os
import socket
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from pardata.collective._rank_zero import barrier
from pardata.collective._reduction import all_reduce_sum
from pardata.data._workers import choose_workers
from pardata.doctor._report import Account, Finding, found_error, report_json, report_text
from pardata.doctor._surroundings import examine_launcher, place, surroundings
from pardata.launch._init import init
from pardata.messages._turn import all_say
from pardata.ranks._device import INTERFACE, visible_devices
from pardata.ranks._launcher import SINGLE
from pardata.ranks._world import World, channel
from pardata.testing._run import run

_Show = Callable[[list[Account]], None]

_LEAST = 2.0  # seconds that any step gets, however late it is
# torchrun ends all ranks as soon as one has failed: rank 0 must have printed by then.
_HEAD_START = 2.0
_NETWORK_CURE = (
    f"is every port open between the hosts? GLOO_SOCKET_IFNAME ({INTERFACE} for GPUs) names "
    "the interface to use"
)
_TIMES_SMALL, _TIMES_LARGE = 200, 5  # how often a measure is taken
_LARGE = 2**21  # numbers, 8 MiB: a hundredth of a second on one host, a second on 100 Mbit/s
_LARGE_ON_GPU = 2**24  # 64 MiB: less does not fill the links between GPUs
_SAMPLE = 2**20  # 4 MiB that a worker hands over


def examine(command: str, *, timeout: float, as_json: bool = False) -> int:
    """Run `command`, "env" or "check", print its report, and return the exit status.

    It is 1 if any rank found an error, on every rank. Collective if a launcher started
    several processes: rank 0 prints.
    """
    report = report_json if as_json else report_text
    show: _Show = lambda accounts: print(report(command, accounts), flush=True)  # noqa: E731  # short
    launch, findings = examine_launcher(os.environ)
    # As its launcher described this process: whether it will be so is not known yet.
    known = launch or SINGLE
    nodes = known.num_nodes or -(-known.size // known.local_size)
    here = World(*known[1:5], 0, nodes, torch.device("cpu"), None, known.launcher)
    # A check shows only what may explain a failure.
    findings += [found for found in surroundings(here) if command == "env" or found.cure]
    own = Account(here.rank, here.size, socket.gethostname(), findings)
    if here.size > 1:
        accounts = _examine_together(command, own, show, timeout)
    else:
        if command == "check" and launch is not None:
            findings += trial_of_two(timeout)
        accounts = [own]
        show(accounts)
    return int(any(account.errors for account in accounts))


def _examine_together(command: str, own: Account, show: _Show, timeout: float) -> list[Account]:
    """Return what each process of a launcher found. Collective: rank 0 prints it."""
    began, doing, findings = time.monotonic(), "joining", own.findings

    def left() -> timedelta:
        return timedelta(seconds=max(_LEAST, began + timeout - time.monotonic()))

    try:
        with init(timeout=left(), tune_cpu=False) as joined:
            if joined.is_main:
                text = f"{joined.size} ranks met in {time.monotonic() - began:.1f} s"
                findings.append(Finding(doing, f"{text}, backend {joined.backend}"))
            findings.append(place(joined))
            if command == "check":
                findings += _trial(joined, left().total_seconds())
            doing = "reports"
            return _reported(command, own, show, left())
    except Exception as error:  # noqa: BLE001  # whatever goes wrong is what is looked for
        findings.append(found_error(doing, error, _NETWORK_CURE))
        _end_alone(command, own, show)


def _reported(command: str, own: Account, show: _Show, patience: timedelta) -> list[Account]:
    """Let rank 0 print what all ranks found, and return it when it has. Collective."""
    said = all_say(channel(), f"pardata {command}", lambda: own, list, timeout=patience)
    # JSON has made lists of them.
    accounts = [Account._make([*who, [Finding(*one) for one in found]]) for *who, found in said]
    if own.rank == 0:
        show(accounts)
    barrier("the report is printed", patience)
    return accounts


def _end_alone(command: str, own: Account, show: _Show) -> NoReturn:
    """Say what this process knows, if the ranks cannot tell each other, and end it."""
    if own.rank == 0:
        show([own])
    else:
        who = f"pardata {command}, rank {own.rank} on {own.host}"
        lines = [": ".join(filter(None, [who, *found[:3]])) for found in own.errors]
        print(*lines, sep="\n", file=sys.stderr, flush=True)
        time.sleep(_HEAD_START)
    os._exit(1)  # leaving a group that is broken would wait for the others


def _trial(here: World, timeout: float) -> list[Finding]:
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
        findings.append(found_error("trial", error, _NETWORK_CURE))
    return findings


def trial_of_two(timeout: float) -> list[Finding]:
    """Start two processes here, and return what came of their trial."""
    began = time.monotonic()
    try:
        first, second = run(_as_rank, timeout, world_size=2, timeout=timeout)
    except Exception as error:  # noqa: BLE001  # whatever goes wrong is what is looked for
        return [found_error("two processes", error, _NETWORK_CURE)]
    text = f"started, joined and left, in {time.monotonic() - began:.1f} s, on the CPU"
    # Two processes cannot share a GPU, and to which it belongs is a launcher's task.
    gpus = len(visible_devices())
    if gpus > 1:
        text += f"; to try GPUs: torchrun --nproc-per-node={gpus} -m pardata check"
    return list(dict.fromkeys([Finding("two processes", text), *first, *second]))


def _as_rank(timeout: float) -> list[Finding]:
    return _trial(init(device="cpu", tune_cpu=False), timeout)


def _all_reduce(here: World) -> Finding:
    got, right = all_reduce_sum(here.rank + 1), here.size * (here.size + 1) // 2
    if got == right:
        return Finding("all-reduce", "correct")
    text = f"the sum over all ranks must be {right}, but is {got}"
    cure = "take this host out and test its memory and its network"
    return Finding("all-reduce", text, cure, is_error=True)


def _measures(here: World) -> list[Finding]:
    seconds = _median_seconds(torch.zeros(1, device=here.device), _TIMES_SMALL)
    numbers = _LARGE if here.device.type == "cpu" else _LARGE_ON_GPU
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
        choose_workers(1, None, here)  # raises if a worker could not send it
        samples = [torch.ones(_SAMPLE)]
        (sample,) = DataLoader(samples, batch_size=None, num_workers=1, timeout=timeout)  # type: ignore[arg-type]  # a list is a dataset
    except (RuntimeError, ValueError) as error:
        cure = "make /dev/shm larger (docker run --shm-size=8g) and writable, or pass num_workers=0"
        return found_error("shared memory", error, cure)
    return Finding("shared memory", f"a worker handed over {sample.nbytes / 2**20:.0f} MiB")
