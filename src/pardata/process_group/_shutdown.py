"""Leaving the group that `init` made: at the end of its block, at exit, or by an exception.

Of an exception that nobody catches one line says whose fault it is, and nobody waits on. That is
the end of a failure's way, which begins in ``store/_remote_error``.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from traceback import format_exception
from types import TracebackType
from weakref import ref

import torch.distributed as dist

from pardata.collectives._barrier import call_off_everywhere
from pardata.collectives._comm_errors import asked, what_is_wrong
from pardata.environment._backend import all_groups
from pardata.environment._logger import get_logger
from pardata.environment._world import Joined, is_child, joined, process
from pardata.store._caller import raise_site
from pardata.store._client import bounded
from pardata.store._remote_error import Failure, consequence, follows, leave_for_torchrun, one_line
from pardata.store._round import call_off

_log = get_logger(__name__)

_PATIENCE = timedelta(seconds=30)
# As long as a rank takes to notice, and to read who failed first.
_GRACE = 2.0
_TOLD = "_pardata_told"  # an attribute of an exception that was reported


def remember(ours: Joined) -> None:
    """Keep what `init` found, and leave at exit the group that it made."""
    if ours.world.launcher != "existing":
        atexit.register(_leave_at_exit)
    process.joined = ours


def leave_at_the_end(error: BaseException | None) -> None:
    """Leave at the end of a block. If an exception leaves it, only tell the other ranks.

    They may then be anywhere: waiting for them would turn an error into a hang.
    """
    if error is None:
        leave()
        return
    atexit.unregister(_leave_at_exit)
    tell_at_the_end(error)


def tell_at_the_end(error: BaseException | None) -> None:
    """Tell the other ranks of an exception that leaves a block, caught outside of it or not."""
    ours = joined()
    if error is None or ours is None or ours.world.size == 1 or is_child():
        return
    with suppress(Exception):  # the exception is raised whatever happens here
        if isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
            _call_off(ours)
        else:
            _part(ours, _report(error, ours))


def _call_off(ours: Joined) -> None:
    """Tell who waits for this rank, or will, that it comes no more."""
    cure = "see where its script ends, and make this call on every rank, or on none"
    with suppress(RuntimeError):  # the store may be gone
        who = f"rank {ours.world.rank} of {ours.world.size}"
        call_off(ours.channel, f"{who} has left the group: {cure}")


def leave() -> None:
    """Leave the group that `init` made in this process, once no rank needs its store."""
    left, process.joined = joined(), None  # nothing if the user has destroyed the group already
    if left is None or left.world.launcher == "existing" or left.pid != os.getpid():
        return
    os.environ.pop("PARDATA_JOINED", None)
    left.on_leaving()
    if left.world.size > 1:
        _call_off(left)
    if not check_out(left.channel.store, left.world.size, hosts_store=left.hosts_store):
        # Their own error says why; this process has finished.
        _log.warning("not all ranks left the process group: another rank failed or was killed")
    dist.destroy_process_group()


def check_out(store: dist.Store, size: int, *, hosts_store: bool) -> bool:
    """Say that this rank needs the store no more; if it lives here, wait until none does.

    Returns whether all ranks said so. It is no turn: a turn asks the store in a thread, and from
    Python 3.12 on none can be started at exit.
    """
    try:
        if store.add("left", 1) == size:
            store.set("all-left", "")
        if hosts_store:
            store.wait(["all-left"], _PATIENCE)
    except RuntimeError:
        return False
    return True


def _leave_at_exit() -> None:
    # Set by the interpreter for an exception that nobody caught.
    if getattr(sys, "last_value", None) is None:
        leave()


def report_uncaught(group: object) -> Callable[[], None]:
    """Log an exception that nobody catches while `group` is there, and tell the other ranks of it.

    Stands before the `sys.excepthook` that it finds, and hands every exception on to it. Returns
    what takes this back; if another hook stands before this one by then, it only hands on.
    """
    # Weak, for a thread keeps the hook that it finds until after it was joined. It must not be the
    # last to know the group, whose end needs the interpreter, which may have ended by then.
    following, watched = sys.excepthook, ref(group)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours, news = joined(), ""
        if ours is None or ours.group is not watched() or is_child() or _TOLD in vars(error):
            following(kind, error, trace)
            return
        with suppress(Exception):  # the traceback is printed whatever happens here
            news = _report(error, ours)
        following(kind, error, trace)
        with suppress(Exception):
            _part(ours, news)

    def remove() -> None:
        if sys.excepthook is hook:
            sys.excepthook = following

    sys.excepthook = hook
    return remove


def _report(error: BaseException, ours: Joined) -> str:
    """Log one line, and leave a text for torchrun.

    Returns the news for who waits for this rank, "" if the store is gone.
    """
    short, known = consequence(error)
    summary = one_line(error) if short else f"{one_line(error)} ({raise_site(error)})"
    if known is None:
        failure = Failure(ours.world.rank, "", short or summary, is_cause=not follows(error))
        patience = 0.0 if failure.is_cause else _GRACE
        known = asked(ours.channel, failure, patience=patience, settle=0.0)
    first, news = known.first, what_is_wrong(known)
    if isinstance(error, KeyboardInterrupt):
        _log.warning("stopped by Ctrl-C (%s)", raise_site(error))
    elif first is None:
        _log.error("failed: %s", summary)
    else:
        _log.error("failed because rank %d %s; here: %s", first.rank, first.fault, known.own.text)
    if (first or known.own).is_cause:
        leave_for_torchrun(news if first else "".join(format_exception(error)))
    vars(error)[_TOLD] = True
    # Else torch would only print where in its code it saw that the store is gone.
    return "" if known.store_is_gone else news


def _part(ours: Joined, news: str) -> None:
    """Leave without waiting for the dead, but not before the living have read the store."""
    if news:
        bounded(lambda: call_off_everywhere(ours.world, ours.channel, news))
    Thread(target=_keep, args=[all_groups()], daemon=True).start()
    if ours.hosts_store:
        left = Failure(ours.world.rank, "", "")  # has been left
        asked(ours.channel, left, patience=_GRACE, settle=_GRACE, leave=False)
        time.sleep(0.2)  # until the last one has read the last note


def _keep(_groups: object) -> None:
    """Keep process groups until the process has ended, as a thread that never does.

    If the interpreter ends a gloo group, torch 2.9 waits there for collectives that are under way,
    for as long as the group's timeout. torch 2.14 does not.
    """
    Event().wait()
