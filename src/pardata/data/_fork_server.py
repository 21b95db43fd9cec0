"""Preloaded by multiprocessing's fork server: unblocks the signals of processes that it starts."""

import signal
import sys
from multiprocessing import util

_BLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, ())

unblocks = True  # False in a loader's worker, which unblocks them once it has its handlers


def _unblock(_: object) -> None:
    if unblocks:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)


util.register_after_fork(sys.modules[__name__], _unblock)
