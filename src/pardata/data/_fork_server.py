"""For multiprocessing's fork server alone, which imports it: what it starts gets all signals."""

import signal
import sys
from multiprocessing import util

_BLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _unblock(_: object) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)


util.register_after_fork(sys.modules[__name__], _unblock)
