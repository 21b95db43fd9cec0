"""Workers as processes: they pass over signals that stop the run, and end with their rank."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker, util
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from pardata.collective._stop_signal import may_stop
from pardata.data._reading import EACH, leave

_PR_SET_PDEATHSIG = 1  # see prctl(2)
_LAST = -200  # after finalizers that close the queues and remove the temporary folder


def started(
    loader: DataLoader[Any], init_fn: Callable[[int], None] | None, rows: Any
) -> Iterator[Any]:
    """Return the steps of a loader; workers that start now pass over signals that stop the run.

    They leave in `rows` what they do.

    A launcher sends its signal to all processes, and Python cannot tell who sent it. So a worker
    passes over it, and ends when its rank ends, whatever ended that.
    """
    numbers = [int(n) for n in signal.Signals if may_stop(n) and os.name != "nt"]
    loader.worker_init_fn = partial(begin, init_fn, numbers, rows, end_with_this_process())
    if not numbers or not loader.num_workers:
        return iter(loader)
    method = (loader.multiprocessing_context or multiprocessing).get_start_method()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        if method != "fork":
            resource_tracker.ensure_running()  # unblocks SIGTERM, up to Python 3.13
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        if method == "forkserver":
            _let_the_fork_server_unblock()
        steps = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for worker in vars(steps)["_workers"]:
        popen = vars(worker)["_popen"]
        # DataLoader calls it for a worker that does not end, and multiprocessing at exit.
        popen.terminate = partial(_kill, weakref.proxy(popen))
    return steps


def _let_the_fork_server_unblock() -> None:
    """Have it import what unblocks signals in the processes that it starts, not in the server."""
    from multiprocessing import forkserver  # noqa: PLC0415  # torch does not import it either

    preloaded = vars(vars(forkserver)["_forkserver"])["_preload_modules"]
    ours = "pardata.data._fork_server"
    multiprocessing.set_forkserver_preload([*dict.fromkeys([*preloaded, ours])])


def _end() -> None:
    """End a spawned worker as forked ones end: without the end of its interpreter.

    There Python takes its handlers back, so that SIGTERM would end the worker after all. It also
    ends threads that are in C++, which says "terminate called without an active exception".
    """
    if sys.exc_info()[0] is None:  # else the error is printed
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _kill(popen: Any) -> None:
    if util.is_exiting():  # DataLoader's handler would raise an error of the worker's death
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    popen.kill()


def awaited(steps: Any, frame: FrameType | None) -> tuple[int, int] | None:
    """Return the worker that is waited for in the thread of a frame, if one is, and its process."""
    while frame is not None and frame.f_code.co_name != "_get_data":
        frame = frame.f_back
    if frame is None or steps is None:
        return None
    worker: int = vars(steps)["_task_info"][vars(steps)["_rcvd_idx"]][0]
    return worker, vars(steps)["_workers"][worker].pid


def end_with_this_process() -> Callable[..., None]:
    """Return what a child calls first, so that it ends with this process, whatever it does.

    Linux kills it, also in C code, which no thread of Python's could end. It does so as soon as the
    thread that forks ends. So a child of another thread than the main one, or of a fork server, is
    left alone, and so is one on another system.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return partial(_end_with, os.getpid() if is_main and sys.platform == "linux" else 0)


def _end_with(parent: int, *_: object) -> None:
    if os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:  # it ended before
            os._exit(1)


def begin(
    init_fn: Callable[[int], None] | None,
    numbers: list[int],
    rows: Any,
    end_with_rank: Callable[[], None],
    worker: int,
) -> None:
    """Begin a worker: it passes over these signals, and ends as soon as its rank has ended.

    There ``get_worker_info().dataset`` is the user's, and not our reader.
    """
    end_with_rank()
    rank: Any = multiprocessing.parent_process()
    if os.getppid() != rank.pid:  # DataLoader would watch the fork server instead of the rank
        vars(torch_worker)["ManagerWatchdog"] = lambda: rank
    for number in numbers:
        signal.signal(number, lambda *_: None)  # a worker's own programs would inherit SIG_IGN
        signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    util.Finalize(None, _end, exitpriority=_LAST)
    reading_thread = threading.get_ident()

    def accompany() -> None:
        while rank.is_alive():
            leave(rows[worker], sys._current_frames()[reading_thread])  # noqa: SLF001  # its only name
            rank.join(EACH)
        os._exit(1)

    threading.Thread(target=accompany, daemon=True).start()
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # it lets nobody else set anything
    if init_fn is not None:
        try:
            init_fn(worker)
        except StopIteration as error:  # DataLoader would take it for the end
            text = f"`worker_init_fn` failed in worker {worker}: StopIteration: {error}"
            raise RuntimeError(text) from error
