"""Run a function on several processes with a working process group."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, TypeVarTuple, Unpack

import torch
import torch.distributed as dist

from pardata._validation import check_int, to_timedelta
from pardata.environment._launchers import LAUNCHERS
from pardata.environment._logger import flush_output
from pardata.store._remote_error import RemoteError, mark_secondary

T = TypeVar("T")
Args = TypeVarTuple("Args")

# How long the others may run after one rank has failed, to fail in their turn.
_GRACE = 5.0
_OWN = ("PARDATA_JOINED", "PARDATA_LAUNCHER")
# The last two are imported by the first optimizer and by fully_shard, and take a second.
_PRELOADED = ["pardata.testing", "torch._dynamo", "torch.distributed.fsdp"]


def run(
    fn: Callable[[Unpack[Args]], T],
    *args: *Args,
    world_size: int = 2,
    timeout: timedelta | float = 120,
    env: Mapping[str, str] | None = None,
) -> list[T]:
    """Run ``fn(*args)`` on `world_size` processes with a gloo group; return each rank's result.

    The group exists when `fn` starts (``pardata.world().launcher`` is ``"existing"``, and `init`
    adopts it). It meets over a file and is destroyed at the end. `fn`, its arguments and its
    results travel by pickle: `fn` must be importable by name, so define it in a module. Each rank
    computes on one thread. The processes come from a server that has imported torch already; the
    first call pays for that.

    Args:
        fn: runs on each rank.
        args: handed to it.
        world_size: number of processes, 1 or more.
        timeout: for the whole, in seconds or a `timedelta`; also of the group's collectives.
        env: environment variables to add on every rank.

    Raises:
        ValueError: `world_size` is below 1, or `timeout` is not above 0.
        TypeError: `world_size` is no integer, `timeout` is no time, or `env` holds anything but
            text. Or the function cannot be pickled, or is of a notebook's cell, or of a script that
            was read from standard input.
        TimeoutError: ranks did not finish; it names them, and where each of them was.
        BaseException: what the first rank to fail raised, with that rank's traceback as its cause.
            It is a `RuntimeError` that names the rank if the error cannot be pickled, or a process
            died.

    >>> run(max, 1, 2, world_size=1)
    [2]
    """
    check_int("world_size", world_size, least=1)
    timeout = to_timedelta(timeout).total_seconds()
    variables = _environment(dict(env or {}))
    try:
        job = pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"`fn` and its arguments must be importable and picklable, but are not: {error}"
        ) from error
    _require_a_script_that_children_find(fn)
    with tempfile.TemporaryDirectory(prefix="pardata-run-") as directory:
        start_method = multiprocessing.get_start_method(allow_none=True)
        meeting = _Meeting(directory, world_size, timeout, variables, start_method)
        team: list[_Rank] = []
        try:
            for rank in range(world_size):
                team.append(_Rank(rank, meeting, job))  # noqa: PERF401  # those before one that fails end
            return _results(team, meeting)
        finally:
            for member in team:
                member.end()


def _environment(added: dict[Any, Any]) -> dict[str, str]:
    """Return the variables of a rank: those of this process, without its launcher's, and more."""
    for name, value in added.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise TypeError(
                f"`env` must map names to text, but maps {name!r} to {value!r}: use str()"
            )
    # A test that inherits the launcher of its runner would join as somebody else's rank. The
    # server's environment is that of its start; a test may have changed its own since.
    left_out = {*_OWN, *(name for launcher in LAUNCHERS for name in launcher.marks)}
    families = tuple(family for launcher in LAUNCHERS for family in launcher.families)
    own = {n: text for n, text in os.environ.items() if n not in left_out}
    return {n: text for n, text in own.items() if not n.startswith(families)} | added


def _require_a_script_that_children_find(fn: Callable[..., object]) -> None:
    script = getattr(sys.modules["__main__"], "__file__", None)  # a notebook has none
    is_in_none = script is None and getattr(fn, "__module__", None) == "__main__"
    if is_in_none or (script is not None and not Path(script).exists()):
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        raise TypeError(
            f"`fn` must be importable by the processes that run it, each of which imports the "
            f"script anew, but {name!r} is run from a notebook, an interactive session or standard "
            f"input: write it to a file, in a notebook with %%writefile, and import it"
        )


class _Meeting(NamedTuple):
    """What the processes of one run have in common."""

    directory: str
    size: int
    timeout: float
    env: dict[str, str]
    start_method: str | None

    def stack_file(self, rank: int) -> Path:
        return Path(self.directory) / f"stack-{rank}"


class _Rank:
    """One process, as the test sees it."""

    def __init__(self, rank: int, meeting: _Meeting, job: bytes) -> None:
        self.rank = rank
        self.outcome: Any = None  # a RemoteError, or its result, pickled
        self.pipe, there = multiprocessing.Pipe(duplex=False)
        self._process = _context().Process(target=_work, args=(rank, meeting, job, there))
        self._process.start()
        there.close()

    def end(self) -> None:
        """Make sure that the process is gone."""
        self._process.join(timeout=0 if self.outcome is None else _GRACE)
        self._process.kill()
        self._process.join()
        self.pipe.close()
        self._process.close()

    def receive(self) -> None:
        """Take this rank's outcome."""
        try:
            self.outcome = self.pipe.recv()
        except EOFError:
            self._process.join()
            text = f"the process ended with exit code {self._process.exitcode}, without a word"
            self.outcome = RemoteError(self.rank, "run", f"ProcessDied: {text}", text)


def _results(team: list[_Rank], meeting: _Meeting) -> list[Any]:
    deadline = time.monotonic() + meeting.timeout
    failures: list[RemoteError] = []
    while waiting := [member for member in team if member.outcome is None]:
        ready = wait([member.pipe for member in waiting], max(0, deadline - time.monotonic()))
        if not ready:
            if failures:
                break  # the others are stuck because of it
            raise TimeoutError(_stuck_text(waiting, meeting))
        for member in waiting:
            if member.pipe in ready:
                member.receive()
                if isinstance(member.outcome, RemoteError):
                    failures.append(member.outcome)
                    deadline = min(deadline, time.monotonic() + _GRACE)
    if failures:
        first = next((each for each in failures if not each.is_secondary), failures[0])
        raise mark_secondary(first.to_exception())
    return [pickle.loads(member.outcome) for member in team]  # noqa: S301  # our own children's


def _stuck_text(stuck: list[_Rank], meeting: _Meeting) -> str:
    files = {member.rank: meeting.stack_file(member.rank) for member in stuck}
    stacks = {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}
    table = "\n".join(f"rank {rank} was here:\n{s or '(not known)'}" for rank, s in stacks.items())
    return (
        f"all {meeting.size} ranks must finish within {meeting.timeout:g} s, but rank "
        f"{', '.join(map(str, stacks))} did not\n\n{table}"
    )


def _context() -> Any:
    # A server process that has imported torch forks a rank in milliseconds; a fresh interpreter
    # takes seconds. It is a child of this process and ends with it.
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _work(rank: int, meeting: _Meeting, job: bytes, pipe: Connection) -> None:
    """Be one rank: join, run, report."""
    gc.freeze()  # a collection would walk all that the server has imported, torch among it
    os.environ.clear()
    os.environ.update(meeting.env, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(meeting.size))
    # That of the parent, for a rank's own children: a process from a server would ask for another
    # server, and each DataLoader worker would take seconds to import torch.
    multiprocessing.set_start_method(meeting.start_method, force=True)
    torch.set_num_threads(1)
    try:
        with meeting.stack_file(rank).open("w") as stack:
            # Just before the parent gives up, write where this rank is.
            faulthandler.dump_traceback_later(max(0.1, meeting.timeout - 1), file=stack)
            outcome: bytes | RemoteError = pickle.dumps(_joined_call(rank, meeting, job))
            faulthandler.cancel_dump_traceback_later()
    except BaseException as error:  # noqa: BLE001  # SystemExit too: the parent raises it
        outcome = RemoteError.of(error, rank=rank, call="run")
    flush_output()
    pipe.send(outcome)


def _joined_call(rank: int, meeting: _Meeting, job: bytes) -> Any:
    size, limit = meeting.size, timedelta(seconds=meeting.timeout)
    store = dist.FileStore(f"{meeting.directory}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    # torch does not wait: a rank whose `fn` leaves the group at once would close connections that
    # another is still making.
    dist.barrier()
    fn, args = pickle.loads(job)  # noqa: S301  # our own parent's
    result = fn(*args)
    # Nobody leaves while another still needs the connection.
    dist.barrier()
    dist.destroy_process_group()
    return result
