"""Ctrl-C, pressed in a test: once, and until the main thread has seen it."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest


def until(condition):
    """Wait until a condition holds, and fail where it does not come."""
    deadline = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def ctrl_c(when):
    """Press Ctrl-C in the block, which must raise it, as soon as a condition holds."""
    out, came = threading.Event(), threading.Event()

    def raise_once(*_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    def press():
        try:
            until(when)
            came.set()
        finally:  # a moment that never came ends the block, too
            press_until_seen()

    def press_until_seen():
        while not out.is_set():  # Python may go to sleep over a signal that comes right before
            os.kill(os.getpid(), signal.SIGINT)
            out.wait(0.01)

    before, presser = signal.signal(signal.SIGINT, raise_once), threading.Thread(target=press)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        out.set()
        presser.join()
        signal.signal(signal.SIGINT, before)
    assert came.is_set()
