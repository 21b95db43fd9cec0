"""Leaving the process group: at the end of a block or of the process, or by an exception.

An exception that ends this rank is reported where it passes: in ``World.__exit__``, else in
`sys.excepthook`. One line of the log names the rank that failed first; the other ranks are told,
and do not wait for this one.
"""

import atexit
import json
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from traceback import format_exception
from types import TracebackType

import torch.distributed as dist

from pardata.collectives._comm_errors import first_failure, report_failure
from pardata.environment._device import all_groups
from pardata.environment._logger import get_logger
from pardata.environment._world import GroupState, group_state, is_child, process
from pardata.store._caller import raise_location
from pardata.store._client import StoreClient
from pardata.store._remote_error import RemoteError, is_secondary, summary_line
from pardata.store._round import abort_rounds

_log = get_logger(__name__)

# The waits for other ranks of a rank that has failed, and of one that hosts the store.
_PATIENCE, _LINGER = timedelta(seconds=2), timedelta(seconds=30)


def register_state(state: GroupState) -> None:
    """Keep the state that `init` made. If it made the group, close the state at exit."""
    process.state = state
    if state.world.launcher == "existing":
        return
    atexit.register(_close_at_exit)
    state.resources.callback(atexit.unregister, _close_at_exit)
    # Closed in the reverse order. The group before the wait for ranks that may be in a collective.
    state.resources.callback(release_store, state.client, _LINGER, hosts_store=state.hosts_store)
    state.resources.callback(_destroy_group, state)
    state.resources.callback(_announce_exit, state)
    state.resources.callback(os.environ.pop, "PARDATA_JOINED", None)


def shutdown(error: BaseException | None) -> None:
    """Leave the group, if `init` made it; if there is an `error`, only tell the other ranks.

    They may then be anywhere: waiting for them would turn an error into a hang. A rank that is
    alone leaves, so that the next `init`, of a notebook, makes a new group.
    """
    state = group_state()  # none if the user has destroyed the group
    if state is None or state.has_failed or is_child():
        return
    succeeds = isinstance(error, SystemExit) and not error.code
    if error is None or succeeds or isinstance(error, GeneratorExit) or state.world.size == 1:
        if state.world.launcher != "existing":
            process.state = None
            state.resources.close()
    else:
        _fail_despite_signals(error, state)


def _close_at_exit() -> None:
    # The interpreter sets it for an exception that nobody caught.
    if getattr(sys, "last_value", None) is None:
        shutdown(None)


def _announce_exit(state: GroupState) -> None:
    who = f"rank {state.world.rank} of {state.world.size} has left the group"
    cure = "see where its script ends, and make this call on every rank, or on none"
    with suppress(Exception):  # the store may have ended
        abort_rounds(state.client, f"{who}: {cure}")


def _destroy_group(state: GroupState) -> None:
    state.group = state.cpu_group = None  # gloo closes its connections with the last reference
    dist.destroy_process_group()


def release_store(client: StoreClient, patience: timedelta, *, hosts_store: bool) -> None:
    """Count this rank as one that needs the store no more; if it hosts it, wait for the others."""

    def leave(store: dist.Store) -> None:
        store.add("left", 1)
        deadline = time.monotonic() + patience.total_seconds()
        while hosts_store and store.add("left", 0) < client.size and time.monotonic() < deadline:
            time.sleep(0.05)

    # The store may have ended: rank 0 has failed, and says why, or has waited long enough.
    with suppress(Exception):
        client.request(leave, patience)


def install_excepthook(state: GroupState) -> None:
    """Report an exception that nobody catches while the group of `state` is there.

    The hook stands before the `sys.excepthook` that it finds, and hands every exception on to it.
    """
    following = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shutdown(error)
        following(kind, error, trace)

    def remove() -> None:
        if sys.excepthook is hook:  # else another one hands on to it
            sys.excepthook = following

    sys.excepthook = hook
    state.resources.callback(remove)


def _fail_despite_signals(error: BaseException, state: GroupState) -> None:
    """Log why this rank ends, and tell the others; `error` is raised whatever happens here.

    The handler of a signal may raise here: PyTorch's does, of a worker that was killed, of which a
    read has just raised.
    """
    for _ in range(3):
        try:
            _fail(error, state)
        except Exception as raised:  # noqa: BLE001  # a handler may raise anything
            if not is_secondary(raised):  # else the store has ended, or does not answer
                continue
        return


def _fail(error: BaseException, state: GroupState) -> None:
    """Log why this rank ends, and tell the others, without waiting for those that are stuck."""
    try:
        abort_rounds(state.client, _report(error, state))
    finally:
        Thread(target=_hold_groups, args=[all_groups()], daemon=True).start()
    release_store(state.client, _PATIENCE, hosts_store=state.hosts_store)


def _report(error: BaseException, state: GroupState) -> str:
    """Log one line, leave a text for torchrun, and return the text for the other ranks."""
    line, client = summary_line(error), state.client
    if not is_secondary(error):
        # First: after an error on a GPU the watchdog of its backend may end this process.
        _log_once(state, f": {line}")
        _write_elastic_error_file("".join(format_exception(error)))
        cause = report_failure(client, RemoteError(client.rank, "", line))
        return f"rank {cause.rank} of {client.size} failed first: {cause.text}"
    text, because = f"rank {client.rank} of {client.size} has failed: {line}", f": {line}"
    try:
        if (first := first_failure(client, _PATIENCE)) is not None:
            text = f"rank {first.rank} of {client.size} failed first: {first.text}"
            why = f"rank {first.rank} failed first: {first.text}"
            because = f" because {why}; here: {raise_location(error)}"
            _write_elastic_error_file(text)
    finally:  # the store may have ended
        _log_once(state, because)
    return text


def _log_once(state: GroupState, cause: str) -> None:
    if not state.has_failed:
        _log.error("failed%s", cause)
        state.has_failed = True


def _write_elastic_error_file(text: str) -> None:
    """Write `text` where torchrun looks for the root cause, as torch's own ``record`` does."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # what follows matters more
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def _hold_groups(_groups: object) -> None:
    """Keep process groups until the process has ended, as a thread that never does.

    If the interpreter ends a gloo group, torch 2.9 waits there for collectives that are under way,
    for as long as the group's timeout. torch 2.14 does not.
    """
    Event().wait()
