"""Workers as processes: they pass over signals that stop the run, and end with their rank."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker, util
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakSet

from torch.utils.data import DataLoader, get_worker_info

from pardata.collectives._stop_signal import may_stop
from pardata.environment._logger import flush_output

_LAST = -200  # after finalizers that close the queues and remove the temporary folder


class _Workers:
    """The workers of this process, which SIGTERM does not end: killed as it ends.

    multiprocessing sends its children SIGTERM then, and waits for them.
    """

    def __init__(self) -> None:
        self._pid, self._processes = 0, WeakSet[BaseProcess]()

    def add(self, processes: set[BaseProcess]) -> None:
        if self._pid != os.getpid():  # else a fork would kill those of its parent
            self._pid, self._processes = os.getpid(), WeakSet[BaseProcess]()
            util.Finalize(None, self._kill, exitpriority=0)
        self._processes.update(processes)

    def _kill(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # DataLoader's raises if a worker dies
        for process in self._processes:
            process.kill()


_workers = _Workers()


def started(loader: DataLoader[Any], init_fn: Callable[[int], None] | None) -> Iterator[Any]:
    """Return the steps of a loader; workers that start now pass over signals that stop the run.

    A launcher sends its signal to all processes, and a handler cannot tell who sent it. So a worker
    passes over it, and ends when its rank ends, whatever ended that. One in C code that holds
    Python's lock ends after that code, if its rank was killed.
    """
    numbers = [int(n) for n in signal.Signals if may_stop(n)]
    loader.worker_init_fn = partial(begin, init_fn, numbers)
    if not loader.num_workers:
        return iter(loader)
    method = start_method(loader)
    if method == "forkserver":
        # It blocks these signals too, and the processes that it starts do not.
        multiprocessing.set_forkserver_preload(["__main__", "pardata.data._fork_server"])
    others = {*multiprocessing.active_children()}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until a worker handles them
    try:
        if method != "fork":
            resource_tracker.ensure_running()  # unblocks SIGTERM, up to Python 3.13
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _workers.add({*multiprocessing.active_children()} - others)


def start_method(loader: DataLoader[Any]) -> str:
    """Return how the workers of a loader are started."""
    return str((loader.multiprocessing_context or multiprocessing).get_start_method())


def _end() -> None:
    """End a spawned worker as forked ones end: without the end of its interpreter.

    There Python takes its handlers back, so that SIGTERM would end the worker after all. It also
    ends threads that are in C++, which says "terminate called without an active exception".
    """
    if sys.exc_info()[0] is None:  # else the error is printed
        flush_output()
        os._exit(0)


def begin(init_fn: Callable[[int], None] | None, numbers: list[int], worker: int) -> None:
    """Begin a worker: it passes over these signals, and ends as soon as its rank has ended.

    There ``get_worker_info().dataset`` is the user's, and not our reader.
    """
    for number in numbers:
        signal.signal(number, lambda *_: None)  # a worker's own programs would inherit SIG_IGN
        signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    util.Finalize(None, _end, exitpriority=_LAST)
    threading.Thread(target=_end_after_rank, daemon=True).start()
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # it lets nobody else set anything
    if init_fn is not None:
        try:
            init_fn(worker)
        except StopIteration as error:  # DataLoader would take it for the end
            text = f"`worker_init_fn` failed in worker {worker}: StopIteration: {error}"
            raise RuntimeError(text) from error


def _end_after_rank() -> None:
    multiprocessing.parent_process().join()  # type: ignore[union-attr]  # a worker has one
    os._exit(1)
