"""Worker processes: start-up, signals, and lifetime, which is that of their rank."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from pardata.collectives._stop_signal import is_stop_signal
from pardata.environment._logger import flush_output

_LAST = -200  # the priority after finalizers of queues and of the temporary folder


def _end_workers(processes: set[BaseProcess], pipe: tuple[Connection, Connection]) -> None:
    """End workers, which ignore SIGTERM, when their iterator is freed or their rank exits.

    At exit, multiprocessing would send SIGTERM and wait. If an error holds the iterator in a cycle,
    the garbage collector closes its queues before the iterator can end the workers.
    """
    if util.is_exiting():
        # DataLoader's handler raises if a worker dies.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in processes:
            process.kill()
    else:
        pipe[1].send_bytes(b"end")  # no worker reads it, so all wake up


def start_workers(loader: DataLoader[Any], init_fn: Callable[[int], None] | None) -> Iterator[Any]:
    """Return ``iter(loader)``, with workers that ignore the signals that stop a run.

    torchrun and SLURM signal all processes of a run. Workers ignore these signals, because the rank
    may still need batches, and end when their rank ends. If the rank is killed, a worker in C code
    that holds the GIL ends after that code.
    """
    if not loader.num_workers:
        return iter(loader)
    numbers = [int(n) for n in signal.Signals if is_stop_signal(n)]
    pipe = multiprocessing.Pipe(duplex=False)
    loader.worker_init_fn = partial(worker_init, init_fn, numbers, pipe[0])
    method = start_method(loader)
    if method == "forkserver":
        # The server inherits the blocked signals; `_fork_server` unblocks them in its children.
        multiprocessing.set_forkserver_preload(["__main__", "pardata.data._fork_server"])
    others, steps = {*multiprocessing.active_children()}, None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until the worker has its handlers
    try:
        if method != "fork":
            resource_tracker.ensure_running()  # up to Python 3.13 it unblocks SIGTERM
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        steps = iter(loader)
        return steps
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if new := {*multiprocessing.active_children()} - others:
            util.Finalize(steps, _end_workers, [new, pipe], exitpriority=0)


def start_method(loader: DataLoader[Any]) -> str:
    """Return the start method of the workers of a loader."""
    return str((loader.multiprocessing_context or multiprocessing).get_start_method())


def _exit_worker() -> None:
    """Exit a spawned worker without finalising its interpreter, as forked workers exit.

    Finalising resets the signal handlers, so that SIGTERM would end the worker. It also ends
    threads in C++, which print "terminate called without an active exception".
    """
    if sys.exc_info()[0] is None:  # otherwise the interpreter prints the error
        flush_output()
        os._exit(0)


def worker_init(
    init_fn: Callable[[int], None] | None, numbers: list[int], reader: Connection, worker: int
) -> None:
    """Initialise a worker: ignore the signals `numbers`, exit with the rank, call `init_fn`.

    The worker also exits when `reader` becomes readable.

    ``get_worker_info().dataset`` becomes the user's dataset in place of the fetcher.
    """
    for number in numbers:
        # Programs that a worker starts would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    util.Finalize(None, _exit_worker, exitpriority=_LAST)
    threading.Thread(target=_exit_if_asked, args=[reader], daemon=True).start()
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # it forbids setattr
    if init_fn is not None:
        try:
            init_fn(worker)
        except StopIteration as error:  # DataLoader would take it for the end of the data
            text = f"`worker_init_fn` failed in worker {worker}: StopIteration: {error}"
            raise RuntimeError(text) from error


def _exit_if_asked(reader: Connection) -> None:
    rank: Any = multiprocessing.parent_process()
    wait([rank.sentinel, reader])
    os._exit(0)
