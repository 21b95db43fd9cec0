"""Small messages between ranks over the process group's own key-value store.

Nothing here is a collective of the backend: a wait has a timeout of its own, a rank that does not
come is named, and the group is usable afterwards. Failures are sent here (``_failure`` records
them): as a value like any other, or by `call_off` to those who would wait in vain.
"""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeVar

import torch.distributed as dist

from pardata.ranks._call_site import call_site
from pardata.ranks._failure import as_consequence
from pardata.ranks._table import ranks_text, table_of

_T = TypeVar("_T")

_SERVER = "the process that serves the group's store (rank 0, or torchrun's agent)"
_MARGIN = 5.0  # seconds beyond its timeout that a store may take to say that it is over


class Peer(Protocol):
    """What this module needs to know of a `World`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Channel:
    """A store, and how long to wait on it by default."""

    store: dist.Store
    timeout: timedelta


def exchange(channel: Channel, peer: Peer, place: str, value: str, timeout: timedelta) -> list[str]:
    """Return the `value` of every rank, in rank order. Collective.

    All exchanges of a group share one sequence, so that ranks in different calls (`place`) find
    out instead of waiting for each other.

    Raises:
        TimeoutError: names the ranks that did not come, or says that the store does not answer.
        RuntimeError: where ranks are in different calls (says which rank is in which), where one
            has failed (see `call_off`), and where the store is gone.
    """
    where = call_site()
    return _answered(timeout, lambda: _exchange(channel, peer, (place, where), value, timeout))


def _exchange(
    channel: Channel, peer: Peer, at: tuple[str, str], value: str, timeout: timedelta
) -> list[str]:
    place, where = at
    turn = channel.store.add(f"exchange/turn/{peer.rank}", 1)
    keys = [f"exchange/{turn}/{rank}" for rank in range(peer.size)]
    channel.store.set(keys[peer.rank], json.dumps([place, value]))
    try:
        _wait(channel.store, keys, at, timeout)
    except TimeoutError:
        # Take it back: this rank's next exchange meets the first one of those who did not come.
        channel.store.set(f"exchange/gave-up/{peer.rank}", str(time.time()))
        channel.store.delete_key(keys[peer.rank])
        channel.store.add(f"exchange/turn/{peer.rank}", -1)
        raise
    there = [json.loads(told) for told in channel.store.multi_get(keys)]  # one request for all
    places = [name for name, _ in there]
    if None in places:
        must = f"`{place}` must be reached by every rank"
        raise called_off(place, must, there[places.index(None)][1], where)
    if turn > 1:
        # Everyone is here, so everyone has read the turn before: two keys a rank is all we keep.
        channel.store.delete_key(f"exchange/{turn - 1}/{peer.rank}")
    if len(set(places)) > 1:
        msg = (
            f"every rank must make the same calls in the same order, but here:\n{table_of(places)}"
        )
        raise RuntimeError(msg)
    return [text for _, text in there]


def _wait(store: dist.Store, keys: list[str], at: tuple[str, str], timeout: timedelta) -> None:
    began = time.time()
    if _came(store, keys, timeout):
        return
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    if not missing:
        return  # the last one came between the timeout and the look
    # A rank that came in this time and gave up before this one is not to blame.
    guilty = [rank for rank in missing if _gave_up(store, rank) < began] or missing
    place, where = at
    text = missing_text(guilty, len(keys), place, timeout)
    error = TimeoutError(f"{text}; this rank waits at {where}")
    raise as_consequence(error, f"{place} at {where}, timed out")


def _gave_up(store: dist.Store, rank: int) -> float:
    key = f"exchange/gave-up/{rank}"
    return float(store.get(key)) if store.check([key]) else 0.0


def _came(store: dist.Store, keys: list[str], timeout: timedelta) -> bool:
    """Wait for all keys; return whether they came in time."""
    try:
        store.wait(keys, timeout)
    except dist.DistNetworkError:
        raise
    except RuntimeError:
        return False
    return True


def missing_text(missing: list[int], size: int, place: str, timeout: timedelta) -> str:
    """Say which ranks did not come, and where to look."""
    return (
        f"`{place}` must be reached by every rank, but {ranks_text(missing)} of {size} did not "
        f"come within {timeout}: {missing_cure(missing)}"
    )


def missing_cure(missing: list[int]) -> str:
    """Say where to look when these ranks did not come."""
    return (
        f"look at the output of {ranks_text(missing)} for an earlier error, or for a branch that "
        f"skips this call"
    )


def called_off(place: str, must: str, news: str, where: str) -> RuntimeError:
    """Return the error of a rank that waits, somewhere, for one that will not come."""
    error = RuntimeError(f"{must}, but {news}; this rank waits at {where}")
    return as_consequence(error, f"{place} at {where}")


def call_off(channel: Channel, peer: Peer, news: str) -> None:
    """Let all who wait, now or later, for this rank to come to an exchange read `news` instead."""
    turn = channel.store.add(f"exchange/turn/{peer.rank}", 0) + 1
    keys = [f"exchange/{turn}/{rank}" for rank in range(peer.size)]
    # In the name of every rank: who waits is woken only when nobody is missing.
    if not channel.store.check(keys):
        for key in keys:
            if not channel.store.check([key]):
                channel.store.set(key, json.dumps([None, news]))


def bounded(seconds: float, work: Callable[[], None]) -> None:
    """Run `work` on the store for so long: it may hang, with the process that serves it."""

    def quietly() -> None:
        with suppress(RuntimeError):  # of the store: it is gone
            work()

    # A thread can be left behind, and does not keep the process from ending.
    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)


def next_turn(channel: Channel, scope: str, rank: int) -> int:
    """Count the calls in `scope` on this rank; kept in the store, beside what is counted."""
    key = f"{scope}/turn/{rank}"
    return _answered(channel.timeout, lambda: int(channel.store.add(key, 1)))


def publish(channel: Channel, key: str, text: str) -> None:
    """Leave `text` under `key` for the ranks that `collect` it."""
    _answered(channel.timeout, lambda: channel.store.set(key, text))


def collect(channel: Channel, key: str, readers: int, place: str, timeout: timedelta) -> str:
    """Wait for what another rank will `publish` and return it; the last reader removes it.

    Raises:
        TimeoutError: where nothing came in time, or the store does not answer for as long as the
            group's timeout.
    """
    where = call_site()
    came, left = False, timeout
    # Rank 0 may work for hours; that the store answers is asked as often as the group's timeout.
    while left > timedelta(0) and not came:
        patience = min(left, channel.timeout)
        came = _answered(patience, partial(_came, channel.store, [key], patience))
        left -= patience
    if not came:
        msg = (
            f"rank 0 must finish its `{place}` within {timeout}, but has not: give `timeout=` a "
            f"larger value if the work takes that long, else look at rank 0's output; this rank "
            f"waits at {where}"
        )
        raise as_consequence(TimeoutError(msg), f"{place} at {where}, timed out")
    return _answered(channel.timeout, lambda: _taken(channel.store, key, readers))


def _taken(store: dist.Store, key: str, readers: int) -> str:
    text = str(store.get(key).decode())
    if store.add(f"{key}/read", 1) == readers:
        store.delete_key(key)
        store.delete_key(f"{key}/read")
    return text


def _answered(timeout: timedelta, work: Callable[[], _T]) -> _T:
    """Return what `work` finds in the store, or raise where the store does not answer.

    In a thread, for torch waits without an end for a store whose process is stopped, or is behind a
    link that was cut: https://github.com/pytorch/pytorch/issues/129367
    """
    outcome: list[_T | BaseException] = []

    def ask() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001  # raised below
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + _MARGIN)
    if not outcome:
        where = call_site()
        msg = (
            f"{_SERVER} must answer, but has not for {timeout}: is it stopped, or is the network "
            f"down? This rank is at {where}"
        )
        raise as_consequence(TimeoutError(msg), f"{where}, timed out")
    (found,) = outcome
    if isinstance(found, dist.DistNetworkError):
        msg = (
            f"{_SERVER} must be there as long as any rank, but has ended: look at its output for "
            f"an earlier error; this rank is at {call_site()}"
        )
        raise as_consequence(RuntimeError(msg)) from found
    if isinstance(found, BaseException):
        raise found
    return found
