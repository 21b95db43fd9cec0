"""The current operation of the training thread, which the watchdog reads.

Does not see operations of other threads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from time import monotonic
from typing import Any, TypeAlias

LOADER = "its loader"  # the operation while a rank waits for a batch
# The call of pardata ("" in the user's code), its start time, and the step of the loader. A plain
# tuple takes half a microsecond less than a class.
OpRecord: TypeAlias = tuple[str, float, Any]


class CurrentOp:
    """The record of the current operation, written by the training thread, read by the watchdog.

    Attributes:
        thread: the id of the training thread; 0 without a watchdog.
        leads: the call in which the other ranks wait for this one, "" outside of one.
        forbids: the reason why a collective call must not be made, "" if it may.
        record: the record of the operation.
    """

    def __init__(self) -> None:
        self.thread, self.leads, self.forbids = 0, "", ""
        self.record: OpRecord = ("", 0.0, None)

    def begin(self) -> None:
        """Make this thread the training thread."""
        self.thread, self.record = get_ident(), ("", monotonic(), None)

    def push(self, call: str) -> OpRecord | None:
        """Start an operation; return the enclosing one, for `pop`."""
        if get_ident() != self.thread:
            return None
        before = self.record
        self.record = (call, monotonic(), before[2])
        return before

    def pop(self, before: OpRecord | None, *step: Any) -> None:
        """End an operation, perhaps with a new step, as progress of the enclosing operation."""
        if before is not None:
            self.record = (before[0], monotonic(), *(step or before[2:]))

    def heartbeat(self) -> None:
        """Record that the operation has made progress."""
        if get_ident() == self.thread:
            self.pop(self.record)


current_op = CurrentOp()


@contextmanager
def forbidding_calls(why: str) -> Iterator[None]:
    """Make each collective call in the block raise; `why` follows its name in the error."""
    before, current_op.forbids = current_op.forbids, why
    try:
        yield
    finally:
        current_op.forbids = before


def check_allowed(call: str) -> None:
    """Raise a `RuntimeError` if the collective `call` is forbidden now."""
    if current_op.forbids:
        raise RuntimeError(f"`{call}` {current_op.forbids}")
