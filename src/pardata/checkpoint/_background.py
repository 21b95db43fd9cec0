"""Work that goes on in a thread, and whose error is never lost."""

import atexit
import os
import sys
import threading
from collections.abc import Callable

from pardata.ranks._logger import get_logger

_log = get_logger(__name__)


class Background:
    """Runs `work` at once in a thread, for which the interpreter waits at its end.

    An error is raised by `join`; a process that ends before it has asked ends with status 1.

    Args:
        work: what to run.
        what: to say in the log, as "the checkpoint of step 3".
    """

    def __init__(self, work: Callable[[], None], what: str) -> None:
        self._work = work
        self._what = what
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"pardata: {what}")
        self._thread.start()
        atexit.register(self._check_at_exit)

    def join(self) -> None:
        """Wait for the end, and raise what the work has raised. Once."""
        self._thread.join()
        atexit.unregister(self._check_at_exit)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  # raised by `join`, or told at exit
            self._error = error

    def _check_at_exit(self) -> None:
        # Threads have ended by now.
        if self._error is None:
            return
        _log.error("%s failed: %s", self._what, self._error, ranks="all")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # nothing else can change the exit status here
