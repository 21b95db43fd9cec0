"""Functions on several ranks. The ranks live on from test to test: a fresh group costs more.

`run` and `run_caught` take what `pardata.testing.run` takes. Ranks that a test leaves out of step,
without their group or in an error are replaced by new ones, and so are those that hang.
"""

import contextlib
import faulthandler
import gc
import logging
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

import torch
import torch.distributed as dist

from pardata import barrier, testing, world
from pardata.ranks._failure import Failure
from pardata.ranks._process import process

_LIFE = 10**6  # seconds that ranks may live
_PATIENCE = 100  # seconds for a test, if it does not say
_GRACE = 5  # seconds for the other ranks when one has failed
_CHECK = timedelta(seconds=10)


@dataclass
class Raised:
    """An exception that a rank raised, as a result."""

    type: str
    text: str
    cause: str
    seconds: float


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
    if fresh or env:
        return testing.run(fn, *args, world_size=world_size, timeout=timeout, env=env)
    team = _teams.get(world_size)
    if team is None:
        team = _teams[world_size] = _Team(world_size)
    try:
        return team.run(pickle.dumps((fn, args)), timeout)
    finally:
        if not team.is_well:
            team.end()
            del _teams[world_size]


def run_caught(fn, *args, world_size: int, **options) -> list[Any]:
    """Run `fn` on every rank and return what each returned or raised."""
    return run(caught, fn, *args, world_size=world_size, **options)


def end_all() -> None:
    """End the ranks that are still there."""
    while _teams:
        _, team = _teams.popitem()
        team.end()


class _Team:
    """Ranks that wait for work, seen from the test."""

    def __init__(self, size: int) -> None:
        self.is_well = True
        self._folder = tempfile.TemporaryDirectory(prefix="pardata-ranks-")
        address = str(Path(self._folder.name) / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(size)
            listener.settimeout(_PATIENCE)
            self._thread = threading.Thread(target=self._live, args=(address, size), daemon=True)
            self._thread.start()
            pipes = [Connection(listener.accept()[0].detach()) for _ in range(size)]
        ranks = [pipe.recv() for pipe in pipes]
        self._pids = [pid for _, pid in sorted(ranks)]
        self._pipes = [pipes[[rank for rank, _ in ranks].index(rank)] for rank in range(size)]

    def _live(self, address: str, size: int) -> None:
        with contextlib.suppress(Exception):  # of ranks that were killed
            testing.run(_serve, address, self._folder.name, world_size=size, timeout=_LIFE)

    def run(self, job: bytes, timeout: float) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((job, timeout))
        outcomes: dict[int, Any] = {}
        failed: list[Failure] = []
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(self._pipes):
            waiting = [p for rank, p in enumerate(self._pipes) if rank not in outcomes]
            ready = wait(waiting, max(0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                outcomes[rank] = outcome = self._received(rank, pipe)
                if isinstance(outcome, Failure):
                    failed.append(outcome)
                    deadline = min(deadline, time.monotonic() + _GRACE)
        if failed:
            self.is_well = False
            next((f for f in failed if "Connection" not in f.text), failed[0]).reraise()
        if len(outcomes) < len(self._pipes):
            self.is_well = False
            raise TimeoutError(self._stuck(outcomes, timeout))
        self.is_well = all(is_well for _, is_well in outcomes.values())
        return [outcomes[rank][0] for rank in range(len(self._pipes))]

    def _received(self, rank: int, pipe: Connection) -> Any:
        try:
            ok, outcome = pipe.recv()
        except (EOFError, OSError):
            return Failure(rank, "run", "ProcessDied", "the process ended without a word", "", None)
        if not ok:
            return Failure.from_json(outcome)
        result, is_well = outcome
        return pickle.loads(result), is_well

    def _stuck(self, outcomes: dict[int, Any], timeout: float) -> str:
        stuck = [rank for rank in range(len(self._pipes)) if rank not in outcomes]
        files = [Path(self._folder.name) / f"stack-{rank}" for rank in stuck]
        stacks = "\n".join(file.read_text() for file in files if file.exists())
        return f"all ranks must finish within {timeout} s, but {stuck} did not\n{stacks}"

    def end(self) -> None:
        if self.is_well:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):
                    pipe.send(None)
            self._thread.join(_GRACE)
        if self._thread.is_alive() or not self.is_well:
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._thread.join(_GRACE)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


_teams: dict[int, _Team] = {}


def _serve(address: str, folder: str) -> None:
    """Be one rank: do what is asked, and leave nothing of it behind."""
    rank = world().rank
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(address)
    pipe = Connection(channel.detach())
    pipe.send((rank, os.getpid()))
    home = _Home()
    gc.freeze()
    while (asked := pipe.recv()) is not None:
        job, timeout = asked
        with (Path(folder) / f"stack-{rank}").open("w") as stack:
            faulthandler.dump_traceback_later(max(0.1, timeout - 1), file=stack)
            try:
                fn, args = pickle.loads(job)
                outcome = True, (pickle.dumps(fn(*args)), home.is_back())
            except BaseException as error:  # noqa: BLE001  # SystemExit too
                outcome = False, Failure.of(error, rank=rank, place="run").to_json()
            faulthandler.cancel_dump_traceback_later()
        pipe.send(outcome)


@dataclass
class _Home:
    """What belongs to a process, as it was before the first test: put back after each."""

    group: Any = field(default_factory=lambda: dist.group.WORLD)
    env: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    states: Any = field(default_factory=lambda: (random.getstate(), torch.get_rng_state()))
    path: list[str] = field(default_factory=lambda: list(sys.path))
    folder: str = field(default_factory=os.getcwd)
    filters: list[Any] = field(default_factory=lambda: list(warnings.filters))
    signals: dict[Any, Any] = field(
        default_factory=lambda: {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2)}
    )

    def is_back(self) -> bool:
        """Put everything back, and return whether the ranks are in step and can go on."""
        if dist.group.WORLD is not self.group:
            return False
        process.joined = None
        process.said.clear()
        os.environ.clear()
        os.environ.update(self.env)
        os.chdir(self.folder)
        sys.path[:] = self.path
        sys.excepthook = sys.__excepthook__
        warnings.filters[:] = self.filters
        for number, handler in self.signals.items():
            signal.signal(number, handler)
        self._of_torch()
        _forget_loggers()
        gc.collect()
        try:
            barrier("the end of a test", _CHECK)
            dist.all_reduce(torch.zeros(1), async_op=True).wait(_CHECK)
        except Exception:  # noqa: BLE001  # whatever it is: these ranks are of no more use
            return False
        return True

    def _of_torch(self) -> None:
        python, own = self.states
        random.setstate(python)
        torch.set_rng_state(own)
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False


def _forget_loggers() -> None:
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("pardata"):
            logger = logging.getLogger(name)
            logger.handlers.clear()
            logger.setLevel(logging.NOTSET)
            logger.disabled = False
            logger.propagate = True
