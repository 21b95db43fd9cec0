"""Call a function on several processes with a process group, at one world size or at several."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from itertools import zip_longest
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, TypeVarTuple, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pardata._validation import check_int, to_timedelta
from pardata.environment._launchers import LAUNCHERS
from pardata.environment._logger import flush_output
from pardata.store._rank_errors import RemoteError, mark_secondary
from pardata.strategies._weights import named_tensors

T = TypeVar("T")
Args = TypeVarTuple("Args")
_Started: TypeAlias = tuple[Any, Connection]  # a rank's process, and the pipe of its result

# Seconds in which the other ranks may end after one has failed.
_GRACE = 5.0
_JOINED = ("PARDATA_JOINED", "PARDATA_LAUNCHER")
# The first optimizer and fully_shard import the last two, which takes a second.
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
    results travel by pickle: `fn` must be importable by name, so define it in a file, not in a
    notebook. Each rank computes on one thread. A server that has imported torch forks
    the processes; the first call starts it.

    Args:
        fn: runs on each rank.
        args: handed to it.
        world_size: number of processes, 1 or more.
        timeout: for the whole, in seconds or a `timedelta`; also of the group's collectives.
        env: environment variables to add on every rank.

    Raises:
        ValueError: `world_size` is below 1, or `timeout` is not above 0.
        TypeError: `world_size` is no integer, `timeout` is no time, or `env` holds anything but
            text.
        Exception: the function or an argument cannot be pickled; `pickle` raises it.
        TimeoutError: ranks did not finish; it names them, and where each of them was.
        BaseException: what the first rank to fail raised, with that rank's traceback as its cause.
            It is a `RuntimeError` that names the rank if the error cannot be pickled, or a process
            died.

    >>> run(max, 1, 2, world_size=1)
    [2]
    """
    world_size = check_int("world_size", world_size, least=1)
    timeout = to_timedelta(timeout).total_seconds()
    variables = _environment(env or {})
    job = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="pardata-run-") as directory:
        method = multiprocessing.get_start_method(allow_none=True)
        settings = _RunSettings(directory, world_size, timeout, variables, method)
        processes: list[_Started] = []
        outcomes: dict[int, Any] = {}
        try:
            # One by one, so that `processes` holds those to end if the next cannot be started.
            processes.extend(_start(rank, settings, job) for rank in range(world_size))
            return _join(processes, outcomes, settings)
        finally:
            for rank, (process, pipe) in enumerate(processes):
                process.join(timeout=_GRACE if rank in outcomes else 0)
                process.kill()
                process.join()
                pipe.close()
                process.close()


def assert_same_at_every_world_size(
    train: Callable[[Unpack[Args]], Iterator[nn.Module | Mapping[str, Tensor | float]]],
    *args: *Args,
    sizes: Iterable[int] = (1, 2, 3),
    rtol: float = 0.0,
    atol: float = 0.0,
    timeout: float = 120,
) -> None:
    """Raise where training is not the same at each world size: on which rank, after which step.

    ``train(*args)`` is your training function, with ``yield model`` after ``optimizer.step()``: a
    generator function. It runs at each of the sizes, on new processes as with `run`, to its
    end: let it take a few steps. `torch.testing.assert_close` compares each rank's steps with those
    of rank 0 at the first size. Of a model it compares parameters and buffers, under every
    strategy. For anything else, as gradients or losses, yield a dict of tensors or numbers.

    Relative differences of 1e-7 in float32 (1e-16 in float64) are sums in another order: pass
    `rtol` and `atol`, or train with ``strategy="exact"``. Larger ones come from wrongly weighted
    local batches, statistics of a local batch, or random numbers that depend on the rank.

    Args:
        train: importable by name, as for `run`.
        args: handed to it.
        sizes: numbers of processes, two or more.
        rtol: by how much a number may differ, relative to what it is compared with. With 0 and an
            `atol` of 0 every bit must be the same, except for NaN and the sign of 0.
        atol: by how much beyond that.
        timeout: seconds for each size.

    Raises:
        AssertionError: training differs. The error names the size, the rank, its first such step,
            and a tensor that differs, by how much.
        ValueError: there are fewer than two sizes, or `train` yields nothing.
        BaseException: what `train` raises, as from `run`.

    >>> import torch
    >>> assert_same_at_every_world_size(iter, [{"weight": torch.ones(2)}], sizes=(1, 2))
    """
    sizes = list(sizes)
    if len(sizes) < 2:
        raise ValueError(f"`sizes` must be two or more, but is {sizes}: add another")
    ranks = [
        (f"rank {rank} of {size}", steps)
        for size in sizes
        for rank, steps in enumerate(run(_recorded, train, args, world_size=size, timeout=timeout))
    ]
    (first, reference), *others = ranks
    if not reference:
        raise ValueError("`train` must yield after each step, but yielded nothing: let it do one")
    nothing: dict[str, Any] = {}
    for rank, steps in others:
        for step, both in enumerate(zip_longest(steps, reference, fillvalue=nothing), start=1):
            try:
                torch.testing.assert_close(*both, rtol=rtol, atol=atol, equal_nan=True)
            except AssertionError as error:
                raise AssertionError(
                    f"steps must agree, but {rank} differs from {first} after step {step}: {error}"
                ) from None


def _recorded(train: Any, args: Any) -> list[dict[str, Any]]:
    """Return the tensors that `train` yields on this rank after each step."""
    return [_copied(trained) for trained in train(*args)]


def _copied(trained: Any) -> dict[str, Any]:
    """Return copies of the yielded tensors, because the next step changes them."""
    named = dict(named_tensors(trained)) if isinstance(trained, nn.Module) else trained
    full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in named.items()}
    return {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in full.items()}


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank: those of this process without its launcher's, and `added`."""
    # With the variables of its runner's launcher, a test would join as a rank of that. The fork
    # server has the environment of its start, and a test may have changed variables since.
    excluded = {*_JOINED, *(name for launcher in LAUNCHERS for name in launcher.variables)}
    prefixes = tuple(family for launcher in LAUNCHERS for family in launcher.prefixes)
    inherited = ((n, text) for n, text in os.environ.items() if not n.startswith(prefixes))
    return {**{n: text for n, text in inherited if n not in excluded}, **added}


class _RunSettings(NamedTuple):
    """The settings that all processes of one `run` share."""

    directory: str
    size: int
    timeout: float
    env: dict[str, str]
    start_method: str | None


def _start(rank: int, settings: _RunSettings, job: bytes) -> _Started:
    """Start a rank; return its process, and the pipe of its pickled result or `RemoteError`."""
    pipe, sender = multiprocessing.Pipe(duplex=False)
    # A fork server that has imported torch forks a rank in milliseconds; a new interpreter takes
    # seconds. The server is a child of this process, and ends with it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_work, args=(rank, settings, job, sender))
    process.start()
    sender.close()
    return process, pipe


def _join(processes: list[_Started], outcomes: dict[int, Any], settings: _RunSettings) -> list[Any]:
    """Return the results of the ranks, or raise the error of the first rank to fail.

    It adds their `outcomes` as they arrive.
    """
    deadline, failures = time.monotonic() + settings.timeout, list[RemoteError]()
    while waiting := [rank for rank in range(settings.size) if rank not in outcomes]:
        ready = wait([processes[rank][1] for rank in waiting], max(0, deadline - time.monotonic()))
        if not ready:
            if failures:  # the other ranks wait for the failed one
                break
            raise TimeoutError(_timeout_text(waiting, settings))
        for rank in waiting:
            process, pipe = processes[rank]
            if pipe in ready:
                outcomes[rank] = outcome = _received(rank, process, pipe)
                if isinstance(outcome, RemoteError):
                    failures.append(outcome)
                    deadline = min(deadline, time.monotonic() + _GRACE)
    if failures:
        first = next((each for each in failures if not each.is_secondary), failures[0])
        raise mark_secondary(first.to_exception())
    return [pickle.loads(outcomes[rank]) for rank in sorted(outcomes)]  # noqa: S301  # from child processes


def _received(rank: int, process: Any, pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        process.join()
        text = f"the process ended with exit code {process.exitcode}, without a word"
        return RemoteError(rank, "run", f"ProcessDied: {text}", text)


def _timeout_text(stuck: list[int], settings: _RunSettings) -> str:
    who = f"rank {', '.join(map(str, stuck))}"
    msg = f"all {settings.size} ranks must finish within {settings.timeout:g} s, but {who} did not"
    for rank in stuck:
        file = Path(f"{settings.directory}/stack-{rank}")
        stack = file.read_text() if file.exists() else ""
        msg += f"\n\nrank {rank} was here:\n{stack or '(not known)'}"
    return msg


def _work(rank: int, settings: _RunSettings, job: bytes, pipe: Connection) -> None:
    """Run `fn` as one rank, and send its result."""
    gc.freeze()  # otherwise a collection would walk all modules of the server
    # The start method of the parent, for DataLoader workers of this rank. A forkserver would start
    # another server, and import torch for seconds.
    multiprocessing.set_start_method(settings.start_method, force=True)
    torch.set_num_threads(1)
    try:
        os.environ.clear()
        os.environ.update(settings.env, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(settings.size))
        with Path(f"{settings.directory}/stack-{rank}").open("w") as stack:
            # Write this rank's stack just before the parent's timeout.
            faulthandler.dump_traceback_later(max(0.1, settings.timeout - 1), file=stack)
            outcome: bytes | RemoteError = pickle.dumps(_joined_call(rank, settings, job))
            faulthandler.cancel_dump_traceback_later()
    except BaseException as error:  # noqa: BLE001  # the parent raises it, SystemExit too
        outcome = RemoteError.of(error, rank=rank, call="run")
    flush_output()
    pipe.send(outcome)


def _joined_call(rank: int, settings: _RunSettings, job: bytes) -> Any:
    size, limit = settings.size, timedelta(seconds=settings.timeout)
    store = dist.FileStore(f"{settings.directory}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    # torch does not wait. A rank whose `fn` ends at once would close connections that others still
    # open.
    dist.barrier()
    fn, args = pickle.loads(job)  # noqa: S301  # from the parent process
    result = fn(*args)
    # No rank leaves while another needs its connection.
    dist.barrier()
    dist.destroy_process_group()
    return result
