"""An exception that nobody catches: one line that says whose fault it is, and nobody waits on.

The end of a failure's way, which begins in ``ranks/_failure``.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from traceback import format_exception
from types import TracebackType
from weakref import ref

from pardata.collective._explanation import asked, what_is_wrong
from pardata.ranks._backend import backends
from pardata.ranks._call_site import raise_site
from pardata.ranks._failure import Failure, consequence, follows, one_line
from pardata.ranks._logger import get_logger
from pardata.ranks._store import bounded
from pardata.ranks._turn import call_off
from pardata.ranks._world import Joined, is_child, joined

_log = get_logger(__name__)

# As long as a rank takes to notice, and to read who failed first.
_GRACE = 2.0


def report_uncaught(group: object) -> Callable[[], None]:
    """Log an exception that nobody catches while `group` is there, and tell the other ranks of it.

    Stands before the `sys.excepthook` that it finds, and hands every exception on to it. Returns
    what takes this back; where another hook stands before this one by then, it only hands on.
    """
    # Weak, for a thread keeps the hook that it finds until after it was joined. It must not be the
    # last to know the group, whose end needs the interpreter, which may have ended by then.
    following, own = sys.excepthook, ref(group)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        found = joined()
        if found is None or found.group is not own() or is_child():
            following(kind, error, trace)
            return
        with suppress(Exception):  # the traceback is printed whatever happens here
            _report(error, found)
        following(kind, error, trace)
        with suppress(Exception):
            _part(found)

    def remove() -> None:
        if sys.excepthook is hook:
            sys.excepthook = following

    sys.excepthook = hook
    return remove


def report_exit(error: SystemExit) -> None:
    """Log a SystemExit that is no success and tell the other ranks of it."""
    found = joined()
    # `sys.excepthook` never hears of it.
    if found is not None and found.world.size > 1 and not is_child():
        with suppress(Exception):  # the process ends whatever happens here
            _report(error, found)
            _part(found)


def _report(error: BaseException, found: Joined) -> None:
    """Log one line, and let everybody know who waits for this rank."""
    here = found.world
    short, known = consequence(error)
    line = one_line(error) if short else f"{one_line(error)} ({raise_site(error)})"
    if known is None:
        own = Failure(here.rank, "", short or line, is_cause=not follows(error))
        patience = 0.0 if own.is_cause else _GRACE
        known = asked(found.channel, own, patience=patience, settle=0.0)
    first = known.first
    news = what_is_wrong(known)
    if first is None:
        _log.error("failed: %s", line)
    else:
        # What others raise too, or are told of by name, is said once.
        is_same = one_line(error).endswith(first.text.rpartition(" (")[0])
        at = raise_site(error) if is_same else known.own.text
        _log.error("failed because rank %d failed first: %s; here: %s", first.rank, first.text, at)
    if (first or known.own).is_cause:
        _record(news if first else "".join(format_exception(error)))
    if not known.store_is_gone:  # else torch would only print where in its code it saw that
        bounded(_GRACE, lambda: call_off(found.channel, news))


def _record(text: str) -> None:
    """Leave `text` where torchrun looks for what failed, as torch's own `record` does."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # what follows matters more
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def _part(found: Joined) -> None:
    """Leave without waiting for the dead, but not before the living have read the store."""
    # In torch 2.6 the end of a gloo backend waits for all that is under way, so it must not come:
    # one reference is never given back.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backends()))
    if found.hosts_store:
        own = Failure(found.world.rank, "", "")  # has been left
        asked(found.channel, own, patience=_GRACE, settle=_GRACE, leave=False)
        time.sleep(0.2)  # for the last one to read the last note
