"""A function in a background thread: the interpreter waits for it, and its error is raised."""

import atexit
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from pardata.environment._logger import flush_output, get_logger

_log = get_logger(__name__)


class BackgroundTask:
    """Runs `work` in a thread. The interpreter waits for it at exit.

    `check` raises its error. If the process exits before `check`, its exit status is 1. A forked
    child has no such thread, and does not wait.

    Args:
        work: the function to run.
        what: its name in the log, as "the checkpoint of step 3".
    """

    def __init__(self, work: Callable[[], object], what: str) -> None:
        self._what, self._pid = what, os.getpid()
        atexit.register(self._check_at_exit)
        executor = ThreadPoolExecutor(1, thread_name_prefix=f"pardata: {what}")
        self._future = executor.submit(work)
        executor.shutdown(wait=False)  # the thread ends after `work`

    def join(self) -> None:
        """Wait until `work` has ended."""
        if os.getpid() == self._pid:
            wait([self._future])

    def check(self) -> None:
        """Wait until `work` has ended, and raise its error."""
        self.join()
        atexit.unregister(self._check_at_exit)
        if self._future.done():
            self._future.result()

    def _check_at_exit(self) -> None:
        # The interpreter has joined its threads by now.
        if not self._future.done() or (error := self._future.exception()) is None:
            return
        _log.error("%s failed: %s", self._what, error, ranks="all")
        flush_output()
        os._exit(1)  # nothing else can change the exit status here
