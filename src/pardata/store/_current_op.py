"""The operation that the training thread is in; the watchdog of a stalled run reads it."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from time import monotonic
from typing import Any, TypeAlias

LOADER = "its loader"  # the operation of a rank that waits for a batch
# The call of pardata ("" in the user's own code), since when, and the step of a loader. A plain
# tuple takes half a microsecond less than a class.
OpRecord: TypeAlias = tuple[str, float, Any]


class CurrentOp:
    """One record at a time, written by the training thread and read by another.

    Attributes:
        thread: the one that writes; 0 if nobody reads.
        leads: the call in which this rank works while the others wait for it, "" outside of one.
        forbids: why no call may be made that needs all ranks, "" if one may.
        record: of the operation.
    """

    def __init__(self) -> None:
        self.thread, self.leads, self.forbids = 0, "", ""
        self.record: OpRecord = ("", 0.0, None)

    def begin(self) -> None:
        """Let this thread be the one that writes."""
        self.thread, self.record = get_ident(), ("", monotonic(), None)

    def push(self, call: str) -> OpRecord | None:
        """Begin an operation; return the enclosing one, for `pop`."""
        if get_ident() != self.thread:
            return None
        before = self.record
        self.record = (call, monotonic(), before[2])
        return before

    def pop(self, before: OpRecord | None, *step: Any) -> None:
        """End an operation, perhaps with a new step. The enclosing one has made progress."""
        if before is not None:
            self.record = (before[0], monotonic(), *(step or before[2:]))

    def heartbeat(self) -> None:
        """Note that the operation has made progress."""
        if get_ident() == self.thread:
            self.pop(self.record)


current_op = CurrentOp()


@contextmanager
def forbidding_calls(why: str) -> Iterator[None]:
    """Let each call that needs all ranks raise in the block; `why` follows its name."""
    before, current_op.forbids = current_op.forbids, why
    try:
        yield
    finally:
        current_op.forbids = before


def check_allowed(call: str) -> None:
    """Raise a `RuntimeError` where `call`, which needs all ranks, must not be made."""
    if current_op.forbids:
        raise RuntimeError(f"`{call}` {current_op.forbids}")
