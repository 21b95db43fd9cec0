"""Leave the process group: at the end of ``with init()``, at exit, or after an exception.

``World.__exit__``, or else `sys.excepthook`, reports an exception that ends this rank. One line of
the log names the rank that failed first. The other ranks get an error in place of waiting for this
one.
"""

import atexit
import json
import os
import sys
import time
import weakref
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
from pardata.store._client import StoreClient
from pardata.store._current_op import raise_location
from pardata.store._rank_errors import RemoteError, has_lost_peer, is_secondary, summary_line
from pardata.store._round import abort_rounds

_log = get_logger(__name__)

# How long a failed rank, and the rank that serves the store, wait for the other ranks.
_PATIENCE, _LINGER = timedelta(seconds=2), timedelta(seconds=30)


def register_state(state: GroupState) -> None:
    """Set the state that `init` created. If `init` created the group, destroy it at exit."""
    process.state = state
    if state.world.launcher == "existing":
        # Its owner destroys it; then its connections are released.
        weakref.finalize(dist.group.WORLD, _release, state).atexit = False
        return
    atexit.register(_close_at_exit)
    state.resources.callback(atexit.unregister, _close_at_exit)
    # Called in reverse order: the group is destroyed before the wait for other ranks, which may be
    # in a collective.
    state.resources.callback(release_store, state.client, _LINGER, hosts_store=state.hosts_store)
    state.resources.callback(_destroy_group, state)
    state.resources.callback(_announce_exit, state)
    state.resources.callback(os.environ.pop, "PARDATA_JOINED", None)


def _release(state: GroupState) -> None:
    """Release the resources of a group, which is not the current one any more."""
    if process.state is state:
        process.state = None
    state.resources.close()


def shutdown(error: BaseException | None) -> None:
    """Destroy the group if `init` created it; after an `error` only report that to the other ranks.

    After an error the other ranks may be in any call, so to wait for them would be a hang. A group
    of one rank is destroyed also then: in a notebook the next `init` creates a new one.
    """
    state = group_state()  # None if the user has destroyed the group
    if state is None or state.has_failed or is_child():
        return
    succeeds = isinstance(error, SystemExit) and not error.code
    if error is None or succeeds or isinstance(error, GeneratorExit) or state.world.size == 1:
        if state.world.launcher != "existing":
            _release(state)
    else:
        _fail_despite_signals(error, state)


def _close_at_exit() -> None:
    # The interpreter sets it for an uncaught exception.
    if getattr(sys, "last_value", None) is None:
        shutdown(None)


def _announce_exit(state: GroupState) -> None:
    who = f"rank {state.world.rank} of {state.world.size} has left the group"
    cure = "see where its script ends, and make this call on every rank, or on none"
    with suppress(Exception):  # the store may have ended
        abort_rounds(state.client, f"{who}: {cure}")


def _destroy_group(state: GroupState) -> None:
    state.cpu_group = None  # gloo closes its connections when the last reference is gone
    dist.destroy_process_group()


def release_store(client: StoreClient, patience: timedelta, *, hosts_store: bool) -> None:
    """Count this rank as done with the store; the rank that serves it waits for all."""

    def leave(store: dist.Store) -> None:
        store.add("left", 1)
        deadline = time.monotonic() + patience.total_seconds()
        while hosts_store and store.add("left", 0) < client.size and time.monotonic() < deadline:
            time.sleep(0.05)

    # The store may have ended: rank 0 has failed, or has waited for its timeout.
    with suppress(Exception):
        client.request(leave, patience)


def install_excepthook(state: GroupState) -> None:
    """Install an excepthook that reports an uncaught exception, until the group ends.

    The hook then calls the previous `sys.excepthook`.
    """
    following = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shutdown(error)
        following(kind, error, trace)

    def remove() -> None:
        if sys.excepthook is hook:  # else a later hook calls it
            sys.excepthook = following

    sys.excepthook = hook
    state.resources.callback(remove)


def _fail_despite_signals(error: BaseException, state: GroupState) -> None:
    """Report `error` to the log and the other ranks, also if a signal's handler raises meanwhile.

    PyTorch's handler of SIGCHLD raises here if a DataLoader worker was killed.
    """
    for _ in range(3):
        try:
            _fail(error, state)
        except Exception as raised:  # noqa: BLE001  # a handler may raise anything
            if not is_secondary(raised):  # otherwise the store has ended or does not answer
                continue
        return


def _fail(error: BaseException, state: GroupState) -> None:
    """Report `error`, and wait for the other ranks only for a short time."""
    try:
        abort_rounds(state.client, _report(error, state))
    finally:
        # It holds the groups until the process ends: when the interpreter destroys a gloo group,
        # torch before 2.14 waits for its collectives until the group's timeout.
        Thread(target=lambda _: Event().wait(), args=[all_groups()], daemon=True).start()
    release_store(state.client, _PATIENCE, hosts_store=state.hosts_store)


def _report(error: BaseException, state: GroupState) -> str:
    """Log one line, write torchrun's error file, and return the text for the other ranks."""
    line, client = summary_line(error), state.client
    if not is_secondary(error):
        # Logged first: after an error on a GPU the backend's watchdog may end this process.
        _log_once(state, f": {line}")
        _write_elastic_error_file("".join(format_exception(error)))
        cause = report_failure(client, RemoteError(client.rank, "", line))
        return f"rank {cause.rank} of {client.size} failed first: {cause.text}"
    text, because = f"rank {client.rank} of {client.size} has failed: {line}", f": {line}"
    try:
        # A rank stores its failure before its connections close.
        patience = 0 if has_lost_peer(error) else _PATIENCE.total_seconds()
        if (first := first_failure(client, patience)[0]) is not None:
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
    """Write `text` to torchrun's file for the cause of a failure, as torch's ``record`` does."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # the error itself matters more
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
