"""What a rank found: each thing with how bad it is and what to do about it, and who the rank is."""

import re
from typing import NamedTuple

OK, WARNING, ERROR = "ok", "warning", "error"


class Finding(NamedTuple):
    """What was looked at, what was seen, and the cure where it is not as it should be."""

    name: str
    text: str
    cure: str = ""
    is_error: bool = False

    @property
    def status(self) -> str:
        """How bad it is."""
        return ERROR if self.is_error else WARNING if self.cure else OK


class Account(NamedTuple):
    """What a rank found, and who it is."""

    rank: int
    size: int
    host: str
    findings: list[Finding]

    @property
    def errors(self) -> list[Finding]:
        """What will not work."""
        return [finding for finding in self.findings if finding.is_error]


def found_error(name: str, error: BaseException, cure: str) -> Finding:
    """Return the finding that `error` is; `cure` is for one whose message has none.

    pardata's own messages have one form, "… must be …, but is …: do …", and bring their cure. Of
    all others the first line is what matters.
    """
    message = str(error).strip().split("\n\n")[0] or type(error).__name__  # then come stacks
    first, *rest = [line for line in message.splitlines() if not line.startswith("(seen on rank")]
    if " must " not in first or ", but " not in first:
        # torch's: where in its sources, and the frames below, help nobody here.
        text = re.sub(r"^\[[^]]*\] ", "", first.partition(". This is typically")[0])
        return Finding(name, text, cure, is_error=True)
    text, colon, own = first.rpartition(": ")
    if not colon or ", but " not in text:  # the cure, if any, is a line of its own
        *rest, own = rest or [cure]
        text = first
    return Finding(name, "\n".join([text.rstrip(":"), *rest]), own, is_error=True)
