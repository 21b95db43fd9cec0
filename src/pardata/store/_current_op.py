"""What this rank is doing: noted by the thread that trains, read by one that looks for hangs."""

from threading import get_ident
from time import monotonic
from typing import Any, TypeAlias

LOADER = "its loader"  # the call of who waits for a batch
# The call of pardata that it is in ("" in the user's own code), since when, and the step of a
# loader that it is in. A plain tuple, which takes half of a microsecond less.
Note: TypeAlias = tuple[str, float, Any]


class Doing:
    """What the thread that trains is in: one note at a time, which another thread reads whole.

    Attributes:
        thread: the one that notes; 0 if nobody reads.
        leads: the call in which this rank works while others wait for it; "" if they do not.
    """

    def __init__(self) -> None:
        self.thread, self.leads = 0, ""
        self.now: Note = ("", 0.0, None)

    def begin(self) -> None:
        """Let this thread be the one that notes, from now on."""
        self.thread, self.now = get_ident(), ("", monotonic(), None)

    def enter(self, call: str) -> Note | None:
        """Note that a call begins, and return what `leave` needs."""
        if get_ident() != self.thread:
            return None
        before = self.now
        self.now = (call, monotonic(), before[2])
        return before

    def leave(self, before: Note | None, *step: Any) -> None:
        """Note that a call has ended, perhaps with a new step: what is around it has got on."""
        if before is not None:
            self.now = (before[0], monotonic(), *(step or before[2:]))

    def get_on(self) -> None:
        """Note that the call of now has got on."""
        if get_ident() == self.thread:
            self.leave(self.now)


doing = Doing()
