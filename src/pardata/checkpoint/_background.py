"""Work in a thread, whose error is never lost."""

import atexit
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from pardata.ranks._logger import get_logger

_log = get_logger(__name__)


class Background:
    """Runs `work` at once in a thread, for which the interpreter waits at its end.

    An error is raised by `join`; a process that ends before it has asked ends with status 1.

    Args:
        work: what to run.
        what: to say in the log, as "the checkpoint of step 3".
    """

    def __init__(self, work: Callable[[], object], what: str) -> None:
        self._what = what
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"pardata: {what}")
        begin = Event()
        # A new thread holds the interpreter for 5 ms, if it has work, and its maker waits for it.
        executor.submit(begin.wait)
        self._future = executor.submit(work)
        executor.shutdown(wait=False)  # it takes no other work
        atexit.register(self._check_at_exit)
        begin.set()

    def join(self) -> None:
        """Wait for the end, and raise what the work has raised."""
        atexit.unregister(self._check_at_exit)
        self._future.result()

    def _check_at_exit(self) -> None:
        # Threads have ended by now.
        error = self._future.exception()
        if error is None:
            return
        _log.error("%s failed: %s", self._what, error, ranks="all")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # nothing else can change the exit status here
