"""Work in a thread, for which the interpreter waits, and whose error is not lost."""

import atexit
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from pardata.environment._logger import flush_output, get_logger

_log = get_logger(__name__)


class BackgroundTask:
    """Runs `work` in a thread, for which the interpreter waits at its end.

    An error is raised by `check`; a process that ends before it has asked ends with status 1. In a
    forked child, which has no such thread, there is nothing to wait for.

    Args:
        work: what to run.
        what: to say in the log, as "the checkpoint of step 3".
    """

    def __init__(self, work: Callable[[], object], what: str) -> None:
        self._what, self._pid = what, os.getpid()
        atexit.register(self._check_at_exit)
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"pardata: {what}")
        self._future = executor.submit(work)
        executor.shutdown(wait=False)  # its thread ends with the work

    def join(self) -> None:
        """Wait for the end."""
        if os.getpid() == self._pid:
            wait([self._future])

    def check(self) -> None:
        """Wait for the end, and raise what the work has raised."""
        self.join()
        atexit.unregister(self._check_at_exit)
        if self._future.done():
            self._future.result()

    def _check_at_exit(self) -> None:
        # Threads have ended by now.
        if not self._future.done() or (error := self._future.exception()) is None:
            return
        _log.error("%s failed: %s", self._what, error, ranks="all")
        flush_output()
        os._exit(1)  # nothing else can change the exit status here
