"""Stop a run on a signal, on all ranks at the same step.

Does not stop in the middle of a step, nor without a call of `agreed` on every rank.
"""

import signal
import threading
import time
from typing import Any, Self

from pardata.collectives._fingerprint import CheckedCollective, WaitMinMax
from pardata.environment._logger import get_logger
from pardata.environment._world import require_world

_log = get_logger(__name__)

# SLURM sends the signal of --signal, usually SIGUSR2, because backends may catch SIGUSR1.
_DEFAULT = signal.SIGTERM, signal.SIGUSR2
# SLURM sends SIGTERM twice at a time limit, and torchrun repeats a signal that its ranks got from
# SLURM.
_REPEATED_WITHIN = 1.0  # seconds; on the cluster of the tests it took 4 to 20 milliseconds


class StopSignal:
    """In the block a signal asks the run to stop; `agreed` is then True on all ranks at one step.

    The block only notes a signal. Launchers repeat it, so a run that stops waits a second at the
    end of the block. In another thread than the main one, as under Ray Train, Python cannot listen
    to signals. That is logged once, and `agreed` still returns True after a signal on another rank.

    Args:
        signals: SIGTERM and SIGUSR2 if none are given.

    Raises:
        ValueError: one of `signals` is no signal.

    >>> with StopSignal() as stop:
    ...     for step in range(3):
    ...         if stop.agreed():
    ...             break  # after saving a checkpoint
    """

    def __init__(self, *signals: int) -> None:
        self._signals = [signal.Signals(number) for number in signals or _DEFAULT]
        self._before: dict[int, Any] | None = None  # the handlers before the block; None before it
        self._received: int | None = None
        self._agreed = False
        self._sent: WaitMinMax | None = None  # waits for the result of the last call

    @property
    def requested(self) -> bool:
        """Whether this process got a signal."""
        return self._received is not None

    def agreed(self) -> bool:
        """Return whether all ranks stop now: true at the same call on every rank. Collective.

        Call it once a step, on every rank. It sends in the background whether this rank got a
        signal, and the next call reads that, so no step waits. The answer is then one step late,
        and stays true. In a single process it is true at once. If a rank calls it once more than
        the others, the next collective call waits until the timeout.

        Raises:
            RuntimeError: it is called before the block.
        """
        world = require_world("StopSignal.agreed")
        if self._before is None:
            msg = "a StopSignal must be entered before `agreed`: write `with StopSignal() as stop:`"
            raise RuntimeError(msg)
        if not self._agreed:
            self._agreed = self.requested if world.size == 1 else self._last_result()
            if self._agreed:
                asked = "another rank was asked to stop"
                why = f"got {signal.Signals(self._received).name}" if self._received else asked
                _log.info("%s: the run stops at this step", why, ranks=[world.rank])
            elif world.size > 1:
                collective = CheckedCollective("StopSignal.agreed", dict, str)
                self._sent = collective.start_min_max([self.requested])
        return self._agreed

    def __bool__(self) -> bool:
        """Raise, because it would always be true.

        Raises:
            TypeError: always.
        """
        raise TypeError("a StopSignal must not be taken for True or False: call its `agreed()`")

    def _last_result(self) -> bool:
        """Return whether any rank had a signal at the previous call."""
        if self._sent is None:
            return False
        least_and_most, self._sent = self._sent, None
        ((_, asked),) = least_and_most()
        return bool(asked)

    def __enter__(self) -> Self:
        self._before = {}
        if threading.current_thread() is not threading.main_thread():
            text = "only the main thread hears signals: this process stops when another rank does"
            _log.warning(text, ranks="all", once=True)
            return self
        for number in self._signals:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._before and (self.requested or self._agreed):
                # A repeated signal after the block would end the process during an asynchronous
                # save.
                time.sleep(_REPEATED_WITHIN)
        finally:  # also after Ctrl-C
            for number, handler in (self._before or {}).items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._before = {}
        if kind is None:
            self._last_result()

    def _handle(self, number: int, _: object) -> None:
        # Nothing else, because a handler interrupts the program at any line.
        self._received = self._received or number


def is_stop_signal(number: int) -> bool:
    """Whether a signal stops a run: a default of `StopSignal`, or one that a block handles."""
    listener = getattr(signal.getsignal(number), "__self__", None)
    return number in _DEFAULT or isinstance(listener, StopSignal)
