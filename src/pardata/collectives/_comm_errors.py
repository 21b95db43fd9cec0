"""A collective that fails raises an error that says which rank failed, or did not come.

All of this runs after an error, so a collective that succeeds costs nothing more. A rank that fails
leaves its exception under one key of the store, where the first one stays. A rank whose collective
lost a connection or timed out reads it; and it reports in which call it was, so that the ranks
without a report can be named.
"""

import json
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from pardata.environment._world import store_client
from pardata.store._caller import call_site
from pardata.store._client import SERVER, StoreClient, append, set_once, wait_for
from pardata.store._current_op import current_op
from pardata.store._rank_format import format_rank_table
from pardata.store._remote_error import RemoteError, is_peer_failure, is_timeout, mark_secondary
from pardata.store._round import forbid_in_rank_zero_section, missing_ranks_text

_FAILURE = "failure"
# For how long to wait for the others. After a lost connection all fail at the same moment; after a
# timeout as far apart as they came.
_LOST, _TIMED_OUT = timedelta(seconds=1), timedelta(seconds=2)


class _Report(NamedTuple):
    """What a rank whose collective failed leaves for the others."""

    rank: int
    call: str
    text: str


def report_failure(client: StoreClient, error: RemoteError) -> None:
    """Leave `error` as the failure of the run, unless another rank has left one."""
    client.request(lambda store: set_once(store, _FAILURE, json.dumps(asdict(error))))


def first_failure(client: StoreClient, patience: timedelta) -> RemoteError | None:
    """Return the failure of the run, if one comes in time."""

    def read(store: dist.Store) -> RemoteError | None:
        is_there = wait_for(store, [_FAILURE], patience)
        return RemoteError(**json.loads(store.get(_FAILURE))) if is_there else None

    return client.request(read, patience)


class explain_comm_errors:  # noqa: N801  # a context manager, as `suppress`
    """A block in which an error of the backend becomes one that names call, step and ranks.

    Costs two looks at the clock if nothing fails. A class takes less time than a generator.

    Args:
        call: the name of the call.
        batch: its epoch and step, if it has them, are in the error.
    """

    __slots__ = ("_batch", "_before", "_began", "_call")

    def __init__(self, call: str, batch: object = None) -> None:
        self._call, self._batch = call, batch

    def __enter__(self) -> None:
        forbid_in_rank_zero_section(self._call)
        self._before = current_op.push(self._call)
        self._began = time.monotonic()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        current_op.pop(self._before)
        if error is None or not is_peer_failure(error):
            return
        better = None
        with suppress(Exception):  # whatever goes wrong here, the first error is not lost
            better = self._explained(error)
        if better is not None:
            raise better from error

    def _explained(self, error: BaseException) -> Exception:
        client, where, call = store_client(), call_site(), self._call
        epoch, step = getattr(self._batch, "epoch", None), getattr(self._batch, "step", None)
        if isinstance(epoch, int) and isinstance(step, int):
            call = f"{call} (epoch {epoch}, step {step})"
        has_timed_out = is_timeout(error)
        ended = "timed out" if has_timed_out else "lost a connection"
        text = f"{call} at {where}, {ended} after {time.monotonic() - self._began:.1f} s"
        own, table = _Report(client.rank, self._call, text), ""
        try:
            first, reports = _exchanged(client, own, _TIMED_OUT if has_timed_out else _LOST)
        except (RuntimeError, TimeoutError):
            why = f"{SERVER} has ended or does not answer: look at its output"
        else:
            why = _diagnosis(client, first, reports, is_timeout=has_timed_out)
            texts = {report.rank: report.text for report in reports}
            rows = [texts.get(rank, "no report") for rank in range(client.size)]
            table = f"\n{format_rank_table(rows)}"
        kind = TimeoutError if has_timed_out else RuntimeError
        must = f"`{call}` must be reached by every rank, but {why}; this rank waits at {where}"
        line = str(error).partition("\n")[0][:300]
        return mark_secondary(kind(f"{must}{table}\n({type(error).__name__}: {line})"))


def _exchanged(
    client: StoreClient, own: _Report, patience: timedelta
) -> tuple[RemoteError | None, list[_Report]]:
    """Report, and return the failure of the run, if there is one, and the reports of all ranks."""

    def collect(store: dist.Store) -> list[_Report]:
        append(store, "reports", json.dumps(own))
        deadline, pause = time.monotonic() + patience.total_seconds(), 0.05
        while True:
            reports = [_Report(*json.loads(line)) for line in store.get("reports").splitlines()]
            has_all = len({report.rank for report in reports}) == client.size
            if has_all or store.check([_FAILURE]) or time.monotonic() > deadline:
                return reports
            time.sleep(pause)
            pause *= 2  # all ranks ask

    reports = client.request(collect, patience)
    return first_failure(client, timedelta(milliseconds=1)), reports


def _diagnosis(
    client: StoreClient, first: RemoteError | None, reports: list[_Report], *, is_timeout: bool
) -> str:
    missing = sorted(set(range(client.size)) - {report.rank for report in reports})
    calls = {report.call for report in reports}
    if first is not None:
        return f"rank {first.rank} of {client.size} failed first: {first.text}"
    if missing:
        waits = ", or wait for one that did not" if len(missing) > 1 else ""
        return missing_ranks_text(missing, client.size, waits)
    if len(calls) > 1:
        cure = "make the same calls in the same order on each"
        if "Checkpointer.save" in calls:
            cure = "call `save` on every rank at the same step, not under `if world.is_main`"
        return f"the ranks are in different calls: {cure}"
    if is_timeout:
        return (
            "they wait for different things in it, or one came too late: give the call the same "
            "arguments (`count`), and the model the same mode and frozen parameters, on every "
            "rank; or give init a larger `timeout`; or the network is down"
        )
    return "a connection between them was lost: is the network down, or did one come too late?"
