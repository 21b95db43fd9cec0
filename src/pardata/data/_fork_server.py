"""For multiprocessing's fork server alone, which imports it: what it starts gets all signals.

Our workers get them as they begin. What came before would end them: it waits until they unblock it.
"""

import multiprocessing
import signal
import sys
from multiprocessing import util

from pardata.data._worker_processes import begin

_BLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _unblock(_: object) -> None:
    arguments = vars(multiprocessing.current_process())["_args"]
    if not any(getattr(argument, "func", None) is begin for argument in arguments):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)


util.register_after_fork(sys.modules[__name__], _unblock)
