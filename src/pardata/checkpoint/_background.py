"""Work in a thread, for which the interpreter waits, and whose error is not lost."""

import atexit
import os
import sys
from collections.abc import Callable
from threading import Event, Thread

from pardata.ranks._logger import get_logger

_log = get_logger(__name__)


class Background:
    """Runs `work` in a thread, for which the interpreter waits at its end.

    An error is raised by `check`; a process that ends before it has asked ends with status 1. In a
    forked child, which has no such thread, there is nothing to wait for.

    Args:
        work: what to run.
        what: to say in the log, as "the checkpoint of step 3".
    """

    def __init__(self, work: Callable[[], object], what: str) -> None:
        self._what = what
        self._error: BaseException | None = None
        self._begin, self._ended = Event(), Event()

        def run() -> None:
            self._begin.wait()
            try:
                work()
            except BaseException as error:  # noqa: BLE001  # `check` raises it
                self._error = error
            finally:
                self._ended.set()

        self._thread = Thread(target=run, name=f"pardata: {what}")

    def start(self) -> None:
        """Begin. Apart from making it, so that Ctrl-C here leaves nothing that nobody knows."""
        atexit.register(self._check_at_exit)
        try:
            # A new thread holds the interpreter for 5 ms, if it has work; its maker waits for it.
            self._thread.start()
        finally:
            self._begin.set()

    def join(self) -> None:
        """Wait for the end."""
        if self._thread.is_alive():
            # If Ctrl-C interrupts the join, Python before 3.13 thinks that the thread has ended.
            self._ended.wait()
            self._thread.join()

    def check(self) -> None:
        """Wait for the end, and raise what the work has raised."""
        self.join()
        atexit.unregister(self._check_at_exit)
        if self._error is not None:
            raise self._error

    def _check_at_exit(self) -> None:
        # Threads have ended by now.
        if self._error is None:
            return
        _log.error("%s failed: %s", self._what, self._error, ranks="all")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # nothing else can change the exit status here
