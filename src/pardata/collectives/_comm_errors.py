"""Turns a backend's "connection closed" or timeout into an error that names the failed rank.

All of this runs after an error, so a collective that succeeds costs nothing more. A rank that fails
writes its exception to one key of the store, unless another rank has. A rank whose collective lost
a connection or timed out reads that key. It also reports its call, so that the ranks without a
report can be named.
"""

import json
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from pardata.environment._world import is_single_process, store_client
from pardata.store._client import SERVER, StoreClient, append, set_once
from pardata.store._current_op import call_site, check_allowed, current_op
from pardata.store._rank_errors import RemoteError, is_peer_failure, is_timeout, mark_secondary
from pardata.store._round import missing_ranks_text

_FAILURE = "failure"
# Seconds without a report of another rank. After a timeout ranks fail at different moments, as they
# entered the collective. A lost connection closes others, one after the other.
_PATIENCE, _PATIENCE_IF_LOST = 2.0, 0.3


def report_failure(client: StoreClient, error: RemoteError) -> RemoteError:
    """Write `error` as the failure of the run unless there is one; return the stored one."""
    text = json.dumps(error._asdict())
    return RemoteError(**json.loads(client.request(lambda store: set_once(store, _FAILURE, text))))


def first_failure(
    client: StoreClient, patience: float
) -> tuple[RemoteError | None, dict[int, str]]:
    """Return the failure of the run, None if there is none, and the calls that ranks reported.

    It waits until a failure is stored, all ranks have reported, or none has for `patience` seconds.
    """

    def read(store: dist.Store) -> tuple[RemoteError | None, dict[int, str]]:
        deadline, calls = time.monotonic() + patience, dict[int, str]()
        while True:  # torch logs a `wait` that times out
            if store.check([_FAILURE]):
                return RemoteError(**json.loads(store.get(_FAILURE))), calls
            if store.check(["reports"]):  # `get` would wait for them
                found = dict(map(json.loads, store.get("reports").splitlines()))
                if len(found) > len(calls):
                    deadline, calls = time.monotonic() + patience, found
            if time.monotonic() >= deadline or len(calls) == client.size:
                return None, calls
            time.sleep(0.02)

    return client.request(read, timedelta(seconds=patience * client.size))


class explain_comm_errors:  # noqa: N801  # a context manager, as `suppress`
    """Context manager: replaces a backend's error by one that names call, step and ranks.

    It reads the clock twice if nothing fails. A class takes less time than a generator.

    Args:
        call: the name of the call.
        batch: the error names its epoch and step, if it has them.
    """

    def __init__(self, call: str, batch: object = None) -> None:
        self._call, self._batch = call, batch

    def __enter__(self) -> None:
        check_allowed(self._call)
        self._before = current_op.push(self._call)
        self._began = time.monotonic()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        current_op.pop(self._before)
        if error is None or is_single_process() or not is_peer_failure(error):
            return
        better = None
        with suppress(Exception):  # the first error is raised whatever happens here
            better = self._explained(error)
        try:
            if better is not None:
                raise better from error
        finally:
            # A frame in a cycle with an error would hold the group's connections, whose end is the
            # only news that other ranks get, until a garbage collection.
            better = error = None

    def _explained(self, error: BaseException) -> Exception:
        call, first_line = self._call, str(error).partition("\n")[0][:300]
        epoch, step = getattr(self._batch, "epoch", None), getattr(self._batch, "step", None)
        if isinstance(epoch, int) and isinstance(step, int):
            call = f"{call} (epoch {epoch}, step {step})"
        try:
            why = _diagnosis(store_client(), self._call, error)
        except (RuntimeError, TimeoutError):
            why = f"{SERVER} has ended or does not answer: look at its output"
        msg = f"`{call}` must be reached by every rank, but {why}; this rank waits at {call_site()}"
        after = f"after {time.monotonic() - self._began:.1f} s ({first_line})"
        if is_timeout(error):
            return mark_secondary(TimeoutError(f"{msg}, and timed out {after}"))
        return mark_secondary(RuntimeError(f"{msg}, and lost a connection {after}"))


def _diagnosis(client: StoreClient, call: str, error: BaseException) -> str:
    """Return which rank failed, or did not come; report this rank's `call`."""
    client.request(lambda store: append(store, "reports", json.dumps([client.rank, call])))
    # A rank reports its failure before its connections close. Without a report it was killed.
    is_lost = not (is_timeout(error) or isinstance(error, dist.DistBackendError))
    first, calls = first_failure(client, _PATIENCE_IF_LOST if is_lost else _PATIENCE)
    if first is not None:
        return f"rank {first.rank} of {client.size} failed first: {first.text}"
    if missing := [rank for rank in range(client.size) if calls.get(rank) != call]:
        return missing_ranks_text(missing, client.size, "")
    return (
        "they wait for different things in it: pass the same arguments (`count`), mode and frozen "
        "parameters on every rank; or one came too late, or the network is down"
    )
