"""One thing that the doctor found, how bad it is, and what to do about it."""

import re
from dataclasses import dataclass

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was seen, and the cure where it is not as it should be."""

    name: str
    status: str
    text: str
    cure: str = ""


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
        return Finding(name, ERROR, text, cure)
    text, colon, own = first.rpartition(": ")
    if not colon or ", but " not in text:  # the cure, if any, is a line of its own
        *rest, own = rest or [cure]
        text = first
    return Finding(name, ERROR, "\n".join([text.rstrip(":"), *rest]), own)
