"""Workers as processes: they pass over signals that stop the run, and end with their rank."""

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

_LAST = -200  # after finalizers that close the queues and remove the temporary folder


def _end_workers(processes: set[BaseProcess], pipe: tuple[Connection, Connection]) -> None:
    """End workers whose iterator is gone, or whose rank ends. They pass over SIGTERM.

    As the rank ends, multiprocessing would send SIGTERM, and wait. A kept error may hold the
    iterator in a cycle. Then the garbage collector closes its queues before it asks workers to end.
    """
    if util.is_exiting():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's raises if a worker dies
        for process in processes:
            process.kill()
    else:
        pipe[1].send_bytes(b"end")  # no worker reads it, so that each one sees it


def start_workers(loader: DataLoader[Any], init_fn: Callable[[int], None] | None) -> Iterator[Any]:
    """Return the steps of a loader; workers that start now pass over signals that stop the run.

    A launcher sends its signal to all processes, and a handler cannot tell who sent it. So a worker
    passes over it, and ends when its rank ends, whatever ended that. One in C code that holds
    Python's lock ends after that code, if its rank was killed.
    """
    if not loader.num_workers:
        return iter(loader)
    numbers = [int(n) for n in signal.Signals if is_stop_signal(n)]
    pipe = multiprocessing.Pipe(duplex=False)
    loader.worker_init_fn = partial(worker_init, init_fn, numbers, pipe[0])
    method = start_method(loader)
    if method == "forkserver":
        # It blocks these signals too, and the processes that it starts do not.
        multiprocessing.set_forkserver_preload(["__main__", "pardata.data._fork_server"])
    others, steps = {*multiprocessing.active_children()}, None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until a worker handles them
    try:
        if method != "fork":
            resource_tracker.ensure_running()  # unblocks SIGTERM, up to Python 3.13
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        steps = iter(loader)
        return steps
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if new := {*multiprocessing.active_children()} - others:
            util.Finalize(steps, _end_workers, [new, pipe], exitpriority=0)


def start_method(loader: DataLoader[Any]) -> str:
    """Return how the workers of a loader are started."""
    return str((loader.multiprocessing_context or multiprocessing).get_start_method())


def _exit_worker() -> None:
    """End a spawned worker as forked ones end: without the end of its interpreter.

    There Python takes its handlers back, so that SIGTERM would end the worker after all. It also
    ends threads that are in C++, which says "terminate called without an active exception".
    """
    if sys.exc_info()[0] is None:  # else the error is printed
        flush_output()
        os._exit(0)


def worker_init(
    init_fn: Callable[[int], None] | None, numbers: list[int], reader: Connection, worker: int
) -> None:
    """Begin a worker: it passes over these signals, and ends as soon as its rank has ended.

    It also ends as soon as `reader` can be read.

    There ``get_worker_info().dataset`` is the user's, and not our reader.
    """
    for number in numbers:
        signal.signal(number, lambda *_: None)  # a worker's own programs would inherit SIG_IGN
        signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    util.Finalize(None, _exit_worker, exitpriority=_LAST)
    threading.Thread(target=_exit_if_asked, args=[reader], daemon=True).start()
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # it lets nobody else set anything
    if init_fn is not None:
        try:
            init_fn(worker)
        except StopIteration as error:  # DataLoader would take it for the end
            text = f"`worker_init_fn` failed in worker {worker}: StopIteration: {error}"
            raise RuntimeError(text) from error


def _exit_if_asked(reader: Connection) -> None:
    rank: Any = multiprocessing.parent_process()
    wait([rank.sentinel, reader])
    os._exit(0)
