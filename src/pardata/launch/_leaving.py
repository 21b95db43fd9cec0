"""Leaving the group that `init` made: at the end of its block, or when the process exits."""

import atexit
import os
import sys
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from pardata.launch._uncaught import report_exit
from pardata.messages._turn import call_off
from pardata.ranks._backend import backends
from pardata.ranks._logger import get_logger
from pardata.ranks._world import Joined, joined, process

_log = get_logger(__name__)

_PATIENCE = timedelta(seconds=30)


def remember(found: Joined) -> None:
    """Keep what `init` found, and leave at exit the group that it made."""
    if found.world.launcher != "existing":
        atexit.register(_leave_at_exit)
    process.joined = found


def leave_at_the_end(error: BaseException | None) -> None:
    """Leave at the end of a block, unless an exception is under way.

    The other ranks may then be anywhere: waiting for them would turn an error into a hang.
    """
    if error is None:
        leave()
        return
    atexit.unregister(_leave_at_exit)  # a SystemExit is forgotten by then
    found = joined()
    if isinstance(error, SystemExit) and error.code:
        report_exit(error)
    elif isinstance(error, SystemExit) and found is not None and found.pid == os.getpid():
        _call_off(found)


def _call_off(found: Joined) -> None:
    """Tell who waits for this rank, or will, that it comes no more."""
    with suppress(RuntimeError):  # the store may be gone
        here = found.world
        call_off(
            found.channel,
            f"rank {here.rank} of {here.size} has left the group: see where its script ends, and "
            f"make this call on every rank, or on none",
        )


def leave() -> None:
    """Leave the group that `init` made in this process, once no rank needs its store."""
    left, process.joined = joined(), None  # nothing where the user has destroyed the group already
    if left is None or left.world.launcher == "existing" or left.pid != os.getpid():
        return
    os.environ.pop("PARDATA_JOINED", None)
    left.on_leaving()
    if left.world.size > 1:
        _call_off(left)
    if not check_out(left.channel.store, left.world.size, hosts_store=left.hosts_store):
        # Their own error says why; this process has finished.
        _log.warning("not all ranks left the process group: another rank failed or was killed")
    _held = backends()
    dist.destroy_process_group()
    del left  # and with it the last but one to know the group


def check_out(store: dist.Store, size: int, *, hosts_store: bool) -> bool:
    """Say that this rank needs the store no more; where it lives here, wait until none does.

    Returns whether all ranks said so. It is no turn: a turn asks the store in a thread, and from
    Python 3.12 on none can be started at exit.
    """
    if size == 1:
        return True
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
