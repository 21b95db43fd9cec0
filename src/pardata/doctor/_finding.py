"""One thing that the doctor found, how bad it is, and what to do about it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

OK, WARNING, ERROR = "ok", "warning", "error"
_ORDER = (OK, WARNING, ERROR)


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was seen, and the cure where it is not as it should be.

    `value` is what was measured, in seconds or in bytes per second.
    """

    name: str
    status: str
    text: str
    cure: str = ""
    value: float | None = None


def worst(findings: Iterable[Finding]) -> str:
    """Return the gravest status among `findings`."""
    return max((finding.status for finding in findings), key=_ORDER.index, default=OK)


def found_error(name: str, error: BaseException, cure: str) -> Finding:
    """Return the finding that `error` is; `cure` is for one whose message has none.

    pardata's own messages have one form, "… must be …, but is …: do …", and bring their cure. Of
    all others the first line is what matters.
    """
    message = str(error).strip().split("\n\n")[0] or type(error).__name__  # then come stacks
    lines = [line for line in message.splitlines() if not line.startswith("(seen on rank")]
    first, *rest = lines
    if " must " not in first or ", but " not in first:
        # torch's: where in its sources, and the frames below, help nobody here.
        text = re.sub(r"^\[[^]]*\] ", "", first.partition(". This is typically")[0])
        return Finding(name, ERROR, text, cure)
    text, colon, own = first.rpartition(": ")
    if not colon or ", but " not in text:  # the cure, if any, is a line of its own
        *rest, own = rest or [cure]
        text = first
    return Finding(name, ERROR, "\n".join([text.rstrip(":"), *rest]), own)
