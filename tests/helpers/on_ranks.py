"""Functions on several ranks. The ranks live on from test to test: a fresh group costs more.

`run` and `run_caught` take what `pardata.testing.run` takes. Ranks that a test leaves out of step,
without their group, or with threads or processes of its own are replaced by new ones, and so are
those that hang or die.
"""

import contextlib
import faulthandler
import functools
import gc
import logging
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import forked
import torch
import torch.distributed as dist

from pardata import barrier, rank_zero_first, testing, world
from pardata.data._batch import uneven_shares
from pardata.environment._logger import logged_once
from pardata.environment._world import group_state, process
from pardata.rng._seeds import loader_counts, run_seed
from pardata.store._rank_errors import RemoteError
from pardata.testing import _run

_LIFE = 10**6  # seconds that ranks may live
_PATIENCE = 120  # seconds for a test, if it does not say
_GRACE = 1  # … for the other ranks when one has failed, before they count as stuck
_FAREWELL = 5  # … for ranks to end
_LINGER = 1  # … for a thread or a process that a test leaves
_CHECK = timedelta(seconds=10)


@dataclass
class Raised:
    """An exception that a rank raised, as a result."""

    type: str
    text: str
    cause: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.type}: {self.text}"


def caught(fn, *args) -> Any:
    """Return what `fn` returns, or the `Raised` of what it raises: for errors on every rank."""
    start = time.monotonic()
    try:
        return fn(*args)
    except BaseException as error:  # noqa: BLE001  # SystemExit too
        seconds = time.monotonic() - start
        return Raised(type(error).__name__, str(error), str(error.__cause__), seconds)


def run(fn, *args, world_size=2, timeout=_PATIENCE, env=None, fresh=False) -> list[Any]:
    """Run ``fn(*args)`` on every rank and return each rank's result.

    `fresh` asks for ranks that nobody had before, as an `env` does: for what is of a whole process,
    or breaks the group on purpose.
    """
    start_server()
    if fresh or env:
        return testing.run(fn, *args, world_size=world_size, timeout=timeout, env=env)
    job = pickle.dumps((fn, args))
    team = _teams.setdefault(world_size, _Team(world_size))
    try:
        return team.run(job, timeout)
    finally:
        if not team.is_well:
            team.end()
            del _teams[world_size]


@functools.cache
def start_server() -> None:
    """Start the server that forks ranks, with pytest imported too, as most test modules do."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        from multiprocessing import forkserver  # which cannot be imported on Windows

        modules = [*_run._PRELOADED, "pytest", "unittest.mock", *forked.preloaded]
        forkserver.set_forkserver_preload(modules)
        forkserver.ensure_running()


def run_caught(fn, *args, world_size: int, **options) -> list[Any]:
    """Run `fn` on every rank and return what each returned or raised."""
    return run(caught, fn, *args, world_size=world_size, **options)


def end_all() -> None:
    """End the ranks that are still there."""
    while _teams:
        _, team = _teams.popitem()
        team.end()


class _Team:
    """Ranks that wait for work, seen from the test. They start at the first `run`."""

    def __init__(self, size: int) -> None:
        self.is_well = True
        self._size = size
        self._pids: list[int] = []
        self._pipes: list[Connection] = []
        self._last_test = ""

    def run(self, job: bytes, timeout: float) -> list[Any]:
        fresh, self.is_well = not self._pipes, False  # until all of it went well
        if fresh:
            self._start()
        elif dead := wait(self._pipes, 0):  # who has nothing to do says nothing
            ranks = sorted(map(self._pipes.index, dead))
            raise RuntimeError(
                f"ranks {ranks} have died since their last test, which was {self._last_test}"
            )
        self._last_test = os.environ.get("PYTEST_CURRENT_TEST", "")
        self._tell((job, timeout))
        outcomes = self._outcomes(timeout)
        failed = [outcome for outcome in outcomes.values() if isinstance(outcome, RemoteError)]
        if len(outcomes) == self._size:  # else some are still at it
            self._tell("go home")
            self.is_well = self._are_back()
        if failed:
            raise next((f for f in failed if not f.is_secondary), failed[0]).to_exception()
        if len(outcomes) < self._size:
            raise TimeoutError(self._stuck(outcomes, timeout))
        return [pickle.loads(outcomes[rank]) for rank in range(self._size)]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pardata-ranks-")
        address = str(Path(self._folder.name) / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(self._size)
            listener.settimeout(_PATIENCE)
            self._thread = threading.Thread(target=self._live, args=(address,), daemon=True)
            self._thread.start()
            for _ in range(self._size):
                self._pipes.append(Connection(listener.accept()[0].detach()))
        ranks = {_said(pipe, _PATIENCE): pipe for pipe in self._pipes}
        self._pids = [pid for _, pid in sorted(ranks)]
        self._pipes = [ranks[key] for key in sorted(ranks)]

    def _live(self, address: str) -> None:
        with contextlib.suppress(BaseException):  # of ranks that were killed, or interrupted
            testing.run(_serve, address, self._folder.name, world_size=self._size, timeout=_LIFE)

    def _outcomes(self, timeout: float) -> dict[int, Any]:
        """Return what the ranks returned, pickled, or their failures: of those that came back."""
        outcomes: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < self._size:
            waiting = [p for rank, p in enumerate(self._pipes) if rank not in outcomes]
            ready = wait(waiting, max(0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in map(self._pipes.index, ready):
                outcomes[rank] = _said(self._pipes[rank], 0) or _died(rank)
                if isinstance(outcomes[rank], RemoteError):
                    deadline = min(deadline, time.monotonic() + _GRACE)
        return outcomes

    def _are_back(self) -> bool:
        """Return whether all ranks can go on; one that cannot leaves the others waiting for it."""
        away = list(self._pipes)
        while ready := wait(away, _PATIENCE) if away else []:
            if not all(_said(pipe, 0) for pipe in ready):
                return False
            away = [pipe for pipe in away if pipe not in ready]
        return not away

    def _stuck(self, outcomes: dict[int, Any], timeout: float) -> str:
        stuck = [rank for rank in range(self._size) if rank not in outcomes]
        files = [Path(self._folder.name) / f"stack-{rank}" for rank in stuck]
        stacks = "\n".join(file.read_text() for file in files if file.exists())
        return f"all ranks must finish within {timeout} s, but {stuck} did not\n{stacks}"

    def _tell(self, message: Any) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # of a rank that has died, as it will turn out
                pipe.send(message)

    def end(self) -> None:
        if self.is_well:
            self._tell(None)
            self._thread.join(_FAREWELL)
        if self._thread.is_alive():
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._thread.join(_FAREWELL)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def _said(pipe: Connection, seconds: float) -> Any:
    """Return what a rank sends within so many seconds, or None if it has died."""
    try:
        return pipe.recv() if pipe.poll(seconds) else None
    except (EOFError, OSError):
        return None


def _died(rank: int) -> RemoteError:
    return RemoteError(rank, "run", "ProcessDied: the process ended without a word")


_teams: dict[int, _Team] = {}


def _serve(address: str, folder: str) -> None:
    """Be one rank: do what is asked, say how it went, and leave nothing of it behind."""
    rank = world().rank
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(address)
    pipe = Connection(channel.detach())
    pipe.send((rank, os.getpid()))
    home = _Home()
    gc.freeze()
    while (asked := _asked(pipe)) is not None:
        with (Path(folder) / f"stack-{rank}").open("w") as stack:
            faulthandler.dump_traceback_later(max(0.1, asked[1] - 1), file=stack)
            pipe.send(_outcome(rank, asked[0]))
            faulthandler.cancel_dump_traceback_later()
        _asked(pipe)  # now that all have finished, and nobody waits for what this one does next
        pipe.send(home.is_back())


def _asked(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        os._exit(0)  # the process of the tests is gone: nobody reads what this one has to say


def _outcome(rank: int, job: bytes) -> bytes | RemoteError:
    """Return what the job returned, pickled, or its failure."""
    try:
        fn, args = pickle.loads(job)
        return pickle.dumps(fn(*args))
    except BaseException as error:  # noqa: BLE001  # SystemExit too
        return RemoteError.of(error, rank=rank, call="run")


@dataclass
class _Home:
    """What belongs to a process, as it was before the first test: put back after each."""

    group: Any = field(default_factory=lambda: dist.group.WORLD)
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    states: Any = field(default_factory=lambda: (random.getstate(), torch.get_rng_state()))
    path: list[str] = field(default_factory=lambda: list(sys.path))
    log: Any = field(default_factory=lambda: (logging.root.level, list(logging.root.handlers)))
    folder: str = field(default_factory=os.getcwd)
    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))
    threads: set[Any] = field(default_factory=lambda: set(threading.enumerate()))
    jobs: int = 0
    signals: dict[Any, Any] = field(
        default_factory=lambda: {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2)}
    )

    def is_back(self) -> bool:
        """Put everything back, and return whether the ranks are in step and can go on."""
        if dist.group.WORLD is not self.group:
            return False
        _leave_cpu_group()
        if process.state is not None:
            process.state.resources.close()
        # A test may leave ranks in different rounds: the next one begins with fresh ones.
        self.jobs += 1
        process.state, process.other, process.others = None, None, 1000 * self.jobs
        logged_once.clear()
        run_seed.seed, run_seed.calls = None, 0
        uneven_shares.batch_size = 0
        loader_counts.clear()
        os.environ.clear()
        os.environ.update(self.env)
        os.chdir(self.folder)
        tempfile.tempdir = None  # both remember where TMPDIR once led
        multiprocessing.current_process()._config.pop("tempdir", None)
        sys.path[:] = self.path
        sys.excepthook = sys.__excepthook__
        warnings.resetwarnings()  # forgets what has been shown already, too
        warnings.filters[:] = self.filters
        for number, handler in self.signals.items():
            signal.signal(number, handler)
        self._of_torch()
        logging.root.level, logging.root.handlers = self.log[0], list(self.log[1])
        _forget_loggers()
        gc.collect()
        gc.freeze()  # what a test has imported: the next collection does not walk it again
        return self._is_alone() and _in_step()

    def _of_torch(self) -> None:
        python, own = self.states
        random.setstate(python)
        torch.set_rng_state(own)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
        forget_compiled()

    def _is_alone(self) -> bool:
        """Return whether no thread and no process of a test goes on in the next one."""
        for thread in set(threading.enumerate()) - self.threads:
            thread.join(_LINGER)
        for child in multiprocessing.active_children():
            child.join(_LINGER)
            child.kill()
        return set(threading.enumerate()) <= self.threads


def forget_compiled():
    """Forget what a test has compiled: all tests together would meet dynamo's limit."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.config.fail_on_recompile_limit_hit = False  # strategy "exact" sets it


def _leave_cpu_group() -> None:
    """Leave what `init` has made beside the group of `run`, or each test would add connections."""
    found = group_state()
    if found is not None and found.cpu_group is not None:
        dist.destroy_process_group(found.cpu_group)


def _in_step() -> bool:
    try:
        barrier("the end of a test", _CHECK)
        with rank_zero_first(local=True, timeout=_CHECK):  # the ranks of a node have turns too
            pass
        dist.all_reduce(torch.zeros(1), async_op=True).wait(_CHECK)
    except Exception:  # noqa: BLE001  # whatever it is: these ranks are of no more use
        return False
    return True


def _forget_loggers() -> None:
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("pardata"):
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.setLevel(logging.NOTSET)
            logger.disabled = False
            logger.propagate = True
