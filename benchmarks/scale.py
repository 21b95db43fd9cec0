"""What it costs ranks to agree, by how many they are: seconds, requests and bytes, to 1,024 ranks.

    python benchmarks/scale.py
    python benchmarks/scale.py --sizes 2 8 32 128
    python benchmarks/scale.py --save

A simulation: the store is real (a TCPStore, in a process of its own), and so is what the library
does at it, but a rank is a thread with a connection, in one of a few processes, and the backend's
group, which is PyTorch's, is not made. Measured from the first rank's call to the last one's
return; with as many ranks as here to a core, that is more than ranks with cores of their own take.
Requests and bytes are those of the rank that has most of them. The exponent is that of the number
of ranks by which the seconds grow, fitted from 64 ranks up: 1 is linear. "By hand" is the least
that ranks can do to meet at a store, without the library: as that grows, the simulation grows.
"""

import atexit
import functools
import json
import logging
import math
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import linear_regression
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from _measure import parser, positive, print_environment, require
from torch import nn
from torch.utils.data import TensorDataset

from pardata import Checkpointer, barrier, make_loader, rank_zero_call, wrap_model
from pardata.checkpoint import _checkpointer
from pardata.collectives import _barrier
from pardata.collectives._all_gather import serialize
from pardata.environment import _device, _world
from pardata.environment._launchers import LaunchInfo
from pardata.environment._world import GroupState
from pardata.process_group import _rendezvous, _shutdown, _tcp_store
from pardata.process_group._watchdog import Watchdog, rank_status
from pardata.store._client import StoreClient
from pardata.store._current_op import CurrentOp, OpRecord, current_op
from pardata.store._round import abort_rounds
from pardata.strategies import _wrap_model
from pardata.strategies._ddp import DdpStrategy
from pardata.strategies._strategy import WrapOptions

SIZES = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
PATIENCE = timedelta(minutes=10)
SMALL = 64  # ranks from which on the exponent is fitted: below, a constant hides the growth
PROCESSES = 4  # that the ranks are shared out among
DATA = TensorDataset(torch.arange(100_000))
FACTS = _wrap_model._facts_of  # noqa: SLF001  # see `simulation`

HAND = "by hand: add, wait"
JOIN, ROUND, WRAP, LOADER = "init, without the backend's group", "barrier", "wrap_model", "loader"
CALL, SAVE, FAILURE = "rank_zero_call", "Checkpointer.save", "one rank fails, all know"
LOOK, HANG = "the watchdog looks once", "a stall is logged"
OPERATIONS = [HAND, JOIN, ROUND, WRAP, LOADER, CALL, SAVE, LOOK, HANG, FAILURE]


class Call(NamedTuple):
    """What one operation was on one rank: two readings of the clock, requests and bytes."""

    begun: float
    ended: float
    requests: int
    sent: int


class Cost(NamedTuple):
    """What one operation cost: from the first call to the last return, and of whoever had most."""

    seconds: float
    requests: int
    sent: int


def counted(name: str) -> Callable[..., Any]:
    """Return a method of `Counted` that asks its store, and counts."""

    def ask(self: "Counted", *args: Any) -> Any:
        answer = getattr(self.store, name)(*args)
        self.requests += 1
        self.sent += sum(map(size_of, (*args, answer)))
        return answer

    return ask


def size_of(part: Any) -> int:
    """Return the bytes of a key, of a value, or of a list of them."""
    if isinstance(part, list):
        return sum(map(size_of, part))
    return len(part) if isinstance(part, str | bytes) else 0


class Counted(dist.Store):
    """A client of the store that counts its requests, and the bytes in both directions."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.store = dist.TCPStore(
            "127.0.0.1", port, None, is_master=False, timeout=PATIENCE, wait_for_workers=False
        )
        self.requests = self.sent = 0

    set, get, add, check = map(counted, ("set", "get", "add", "check"))
    wait, multi_get, compare_set = map(counted, ("wait", "multi_get", "compare_set"))
    append, multi_set = map(counted, ("append", "multi_set"))
    delete_key = deleteKey = counted("delete_key")  # noqa: N815  # as a PrefixStore asks for it

    def clone(self) -> "Counted":
        """Return this one: a second connection would count apart."""
        return self


class ProcessOfThread(_world.Process):
    """The state that the library keeps in a process, kept for each thread: a thread is a rank."""

    _kept = threading.local()

    @property  # type: ignore[override]  # a plain attribute in a process of one rank
    def state(self) -> Any:
        """That of this thread."""
        return getattr(self._kept, "state", None)

    @state.setter
    def state(self, found: object) -> None:
        """Keep it for this thread."""
        self._kept.state = found


_kept = threading.local()


def _of_thread(name: str) -> property:
    return property(lambda _: getattr(_kept, name, ""), lambda _, text: setattr(_kept, name, text))


class OpOfThread(CurrentOp):
    """What a rank does while others wait, and may not do, kept for each thread."""

    # Plain attributes in a process of one rank.
    leads = _of_thread("leads")  # type: ignore[assignment]
    forbids = _of_thread("forbids")  # type: ignore[assignment]


class Simulated:
    """One rank: a connection to the store, and the operations in their order."""

    def __init__(self, launch: LaunchInfo, directory: str) -> None:
        self.store = Counted(launch.master_port)
        self._launch = launch
        client = StoreClient(self.store, PATIENCE, launch.rank, launch.size)
        with patch.object(Watchdog, "start"):
            self._watchdog = Watchdog(GroupState(_world.single_world(), client), 60)
        atexit.unregister(self._watchdog.stop)  # it does not run
        self.operations: dict[str, Callable[[], object]] = {
            HAND: self._meet_by_hand,
            JOIN: self._join,
            ROUND: barrier,
            WRAP: lambda: wrap_model(transformer(), "ddp", device="meta"),
            LOADER: lambda: make_loader(DATA, 4 * launch.size, shuffle=True, seed=0, num_workers=0),
            CALL: lambda: rank_zero_call(len, "four"),
            SAVE: lambda: Checkpointer(directory).save(0, weights=torch.zeros(8), epoch=3),
            LOOK: lambda: self._watchdog._poll(self._status()),  # noqa: SLF001  # see `simulation`
            HANG: self._stall,
            FAILURE: self._fail,
        }

    def _meet_by_hand(self, name: str = "by hand") -> None:
        if self.store.add(name, 1) == self._launch.size:
            self.store.set(f"{name}: all are here", "")
        self.store.wait([f"{name}: all are here"], PATIENCE)

    def _join(self) -> None:
        launch = self._launch
        _tcp_store._opened[launch.launch_id] = self.store, launch.rank == 0  # noqa: SLF001  # as above
        device = torch.device("cpu")
        _world.process.state = _rendezvous.form_group(
            launch, backend="gloo", timeout=PATIENCE, device=device
        )

    def _status(self) -> Any:
        record: OpRecord = ("barrier()", time.monotonic() - 60, None)
        return rank_status(record, sys._getframe())  # noqa: SLF001  # its only name

    def _stall(self) -> None:
        # As at the end of a tick, within which all ranks have answered.
        self._watchdog._report_self(self._status(), is_first=True, record=current_op.record)  # noqa: SLF001
        self._meet_by_hand("answered")
        self._watchdog._log_once()  # noqa: SLF001

    def _fail(self) -> None:
        state: Any = _world.group_state()
        if self._launch.rank == self._launch.size // 2:
            try:
                Path("photo-17.jpg").read_bytes()
            except FileNotFoundError as error:
                # As at the end of a process, which does not come here.
                news = _shutdown._report(error, state)  # noqa: SLF001
                abort_rounds(state.client, news)
            return
        try:
            barrier()
        except RuntimeError as error:
            require(holds="photo-17.jpg" in str(error), what=f"a rank was told {error}")
        else:
            require(holds=False, what="a rank did not hear that another failed")

    def measured(self, name: str) -> Call:
        """Run an operation; return what it cost."""
        requests, sent = self.store.requests, self.store.sent
        begun = time.perf_counter()  # the same clock in every process
        self.operations[name]()
        ended = time.perf_counter()
        return Call(begun, ended, self.store.requests - requests, self.store.sent - sent)


@functools.cache
def transformer() -> nn.Module:
    """Return a model without contents that has the 722 parameters of one of 70 billion."""
    wide, narrow, inner = 8192, 1024, 28672
    with torch.device("meta"):
        blocks = []
        for _ in range(80):
            shapes = [(wide, wide), (wide, narrow), (wide, narrow), (wide, wide)]
            shapes += [(wide, inner), (wide, inner), (inner, wide)]
            linear = [nn.Linear(*shape, bias=False) for shape in shapes]
            blocks.append(nn.ModuleList([*linear, nn.RMSNorm(wide), nn.RMSNorm(wide)]))
        ends = [nn.Embedding(128256, wide), nn.RMSNorm(wide)]
        return nn.ModuleList([*ends, *blocks])


@contextmanager
def simulation() -> Iterator[None]:
    """Let each thread be a rank, and leave out what needs PyTorch's group or a rank's own time."""
    settings = WrapOptions(_world.world(), None, sync_batchnorm=False, options={})
    told, result = FACTS(transformer(), "ddp", settings), serialize(4)
    with ExitStack() as stack:
        for where, name, what in (
            (dist, "init_process_group", lambda *_, **__: None),
            (_device, "new_gloo_group", lambda *_: None),
            (_checkpointer, "gather_to_rank_zero", lambda here, own, *_: [own] * here.size),
            (_barrier, "broadcast_bytes", lambda *_: result),
            (_world, "current_world", lambda: _world.process.state.world),
            # There is no group.
            (_world, "weakref", SimpleNamespace(ref=lambda group: lambda: group)),
            (GroupState, "is_current", lambda _: True),
            (_wrap_model, "_facts_of", lambda *_: told),
            (_wrap_model, "_check", lambda *_: None),
            (_wrap_model, "check_supported", lambda *_: None),  # nothing is sent
            (nn.Module, "to", lambda model, _: model),
            (DdpStrategy, "wrap", lambda _, model, __: model),
        ):
            stack.enter_context(patch.object(where, name, what))
        _world.process.__class__ = ProcessOfThread
        current_op.__class__ = OpOfThread
        yield


def simulate(launches: list[LaunchInfo], directory: str, meet: Any, answers: Any) -> None:
    """Run in a process of its own: be these ranks."""
    torch.set_num_threads(1)
    logging.getLogger("pardata.process_group._watchdog").setLevel(logging.ERROR)
    calls: dict[str, list[Call]] = {name: [] for name in OPERATIONS}
    together = threading.Barrier(len(launches), action=meet.wait)
    connecting = threading.Lock()  # not all at once, as the server's queue is short

    def live(launch: LaunchInfo) -> None:
        try:
            with connecting:
                rank = Simulated(launch, directory)
            for name in OPERATIONS:
                together.wait()
                calls[name].append(rank.measured(name))
        except BaseException:
            together.abort()  # nobody waits for this rank
            meet.abort()
            raise

    with simulation():
        threads = [threading.Thread(target=live, args=(launch,)) for launch in launches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    answers.put(None if together.broken else calls)


def measure(size: int) -> dict[str, Cost]:
    """Return what each operation cost, with so many ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pardata"])
    server = dist.TCPStore("127.0.0.1", 0, None, True, timeout=PATIENCE, wait_for_workers=False)
    processes = min(size, PROCESSES)
    meet, answers = context.Barrier(processes), context.Queue()
    launches = [
        LaunchInfo("torchrun", rank, size, rank, size, 0, 1, "127.0.0.1", server.port)
        for rank in range(size)
    ]
    with tempfile.TemporaryDirectory() as directory:
        shares = [launches[first::processes] for first in range(processes)]
        workers = [
            context.Process(target=simulate, args=(share, directory, meet, answers))
            for share in shares
        ]
        for worker in workers:
            worker.start()
        found = [answers.get() for _ in workers]
        for worker in workers:
            worker.join()
    if None in found:
        raise RuntimeError("every rank must come to the end, but one did not: see its traceback")
    return {name: cost_of([call for calls in found for call in calls[name]]) for name in OPERATIONS}


def cost_of(calls: list[Call]) -> Cost:
    """Return what an operation cost, from what it was on every rank."""
    return Cost(
        max(call.ended for call in calls) - min(call.begun for call in calls),
        max(call.requests for call in calls),
        max(call.sent for call in calls),
    )


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the power of the number of ranks by which the seconds grow: least squares, of logs."""
    points = [
        (math.log(size), math.log(took))
        for size, took in zip(sizes, seconds, strict=True)
        if size >= SMALL
    ]
    return linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else math.nan


def growth(costs: Mapping[str, Mapping[Any, Sequence[float]]]) -> str:
    """Return a table of the seconds by the number of ranks, of requests and bytes at the largest.

    Args:
        costs: by operation and number of ranks, the fields of `Cost`.
    """
    sizes = list(map(int, next(iter(costs.values()))))  # JSON has texts
    header = ["s", *map(str, sizes), "exponent", f"requests at {sizes[-1]}", f"kB at {sizes[-1]}"]
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    for name, by_size in costs.items():
        *_, (_, requests, sent) = by_size.values()
        seconds = [cost[0] for cost in by_size.values()]
        cells = [*(f"{value:.3g}" for value in seconds), f"{exponent(sizes, seconds):.2f}"]
        lines.append(f"| {' | '.join([name, *cells, f'{requests:,}', f'{sent / 1e3:,.1f}'])} |")
    return "\n".join(lines)


def main() -> None:
    """Simulate each number of ranks, and print what the operations cost."""
    arguments = parser(__doc__, 3, "simulations of each number of ranks; the fastest counts")
    arguments.add_argument(
        "--sizes", nargs="+", type=positive, default=SIZES, help="numbers of ranks (default: all)"
    )
    args = arguments.parse_args()
    about = print_environment()
    found: dict[int, dict[str, Cost]] = {}
    for size in sorted(args.sizes):
        rounds = [measure(size) for _ in range(args.rounds)]
        found[size] = {name: min(costs[name] for costs in rounds) for name in OPERATIONS}
    costs = {name: {size: each[name] for size, each in found.items()} for name in OPERATIONS}
    print(f"\n{growth(costs)}\n", flush=True)
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"environment": about, "costs": costs}, indent=1)
        (args.save / "scale.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
