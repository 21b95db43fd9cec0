"""What this rank is doing: noted by the thread that trains, read by one that looks for hangs."""

from collections.abc import Callable
from threading import get_ident
from time import monotonic
from types import FrameType
from typing import Any, TypeAlias

# From the innermost frame of the thread that trains, what more can be said of its call.
Tell: TypeAlias = Callable[[FrameType], str]
# The call of pardata that it is in ("" in the user's own code), since when, what says more of it,
# and the step of a loader that it is in. A plain tuple, which takes half of a microsecond less.
Note: TypeAlias = tuple[str, float, Tell | None, Any]


class Doing:
    """What the thread that trains is in: one note at a time, which another thread reads whole.

    Attributes:
        thread: the one that notes; 0 if nobody reads.
        leads: the call in which this rank works while others wait for it; "" if they do not.
    """

    def __init__(self) -> None:
        self.thread, self.leads = 0, ""
        self.now: Note = ("", 0.0, None, None)

    def begin(self) -> None:
        """Let this thread be the one that notes, from now on."""
        self.thread, self.now = get_ident(), ("", monotonic(), None, None)

    def enter(self, call: str, tell: Tell | None = None) -> Note | None:
        """Note that a call begins, and return what `leave` needs."""
        if get_ident() != self.thread:
            return None
        before = self.now
        self.now = (call, monotonic(), tell, before[3])
        return before

    def leave(self, before: Note | None, *step: Any) -> None:
        """Note that a call has ended, perhaps with a new step: what is around it has got on."""
        if before is not None:
            self.now = (before[0], monotonic(), before[2], *(step or before[3:]))

    def get_on(self) -> None:
        """Note that the call of now has got on."""
        if get_ident() == self.thread:
            self.leave(self.now)


doing = Doing()
