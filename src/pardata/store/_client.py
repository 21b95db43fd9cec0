"""The process group's own key-value store, asked so that nobody waits for it without an end."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from pardata.store._caller import call_site
from pardata.store._remote_error import as_consequence

_T = TypeVar("_T")

SERVER = "the process that serves the group's store (rank 0, or torchrun's agent)"
PART = 2**22  # bytes: a TCPStore cuts the connection over which a value of more than 8 MiB comes
# Seconds that a store may take to answer, which is slow if its machine is. One that is gone says so
# at once: this is for a process that is stopped, or a network that is down.
_MARGIN = 5.0


@dataclass(frozen=True)
class Channel:
    """A store, how long to wait on it by default, and which of how many ranks this one is."""

    store: dist.Store
    timeout: timedelta
    rank: int
    size: int


def answered(timeout: timedelta, work: Callable[[], _T]) -> _T:
    """Return what `work` finds in the store.

    Raises:
        TimeoutError: if the store does not answer.
        RuntimeError: if it is gone.
    """
    outcome = bounded(work, timeout.total_seconds())
    if not outcome:
        where = call_site()
        what = f"must answer, but has not for {timeout}: is it stopped, or is the network down?"
        error = TimeoutError(f"{SERVER} {what} This rank is at {where}")
        raise as_consequence(error, f"{where}, timed out")
    (answer,) = outcome
    if isinstance(answer, dist.DistNetworkError):
        what = "must stay as long as any rank, but has ended: look at its output for an error"
        text = f"{SERVER} {what}; this rank is at {call_site()}"
        raise as_consequence(RuntimeError(text)) from answer
    if isinstance(answer, BaseException):
        raise answer
    return answer


def bounded(work: Callable[[], _T], seconds: float = 0.0) -> list[_T | BaseException]:
    """Run `work`, which may wait for so long; return what came of it, nothing if the store hangs.

    It runs in a thread, which can be left behind. torch waits without an end for a store whose
    process is stopped, or is behind a link that was cut.
    https://github.com/pytorch/pytorch/issues/129367
    """
    outcome: list[_T | BaseException] = []

    def ask() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001  # for the caller
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds + _MARGIN)
    return outcome[:1]


def came(store: dist.Store, keys: list[str], timeout: timedelta) -> bool:
    """Wait for all `keys`; return whether they came in time."""
    try:
        store.wait(keys, timeout)
    except dist.DistNetworkError:
        raise
    except RuntimeError:
        return False
    return True


def put_in_parts(store: dist.Store, key: str, text: str) -> list[str]:
    """Write a text that is too long for one value, of ASCII; return the keys of its parts."""
    starts = range(0, len(text), PART)
    for start in starts:
        store.set(f"{key}/{start}", text[start : start + PART])
    return [f"{key}/{start}" for start in starts]


def taken(store: dist.Store, keys: list[str], readers: int) -> str:
    """Return a text that was put in parts. The last of so many `readers` deletes it."""
    text = b"".join(map(store.get, keys)).decode()
    if store.add(f"{keys[0]}/read", 1) == readers:
        for key in [*keys, f"{keys[0]}/read"]:
            store.delete_key(key)
    return text


def append(store: dist.Store, key: str, line: str) -> None:
    """Add a line to those under `key`."""
    store.append(key, f"{line}\n")  # type: ignore[attr-defined]  # torch's stubs leave it out


def texts_of(store: dist.Store, keys: Sequence[str]) -> list[str | None]:
    """Return what is under these keys, and None for one that is not there."""
    present = list(keys)
    if not store.check(present):
        present = [key for key in keys if store.check([key])]
    texts = dict(zip(present, store.multi_get(present), strict=True)) if present else {}
    return [texts[key].decode() if key in texts else None for key in keys]


def apart(channel: Channel, name: str) -> dist.Store:
    """Return a new part of the store, by a connection of its own. Every rank calls it as often.

    A client lets one thread ask at a time, also while that waits.
    """
    prefix = f"{name}/{channel.store.add(f'{name}s of {channel.rank}', 1)}"
    return dist.PrefixStore(prefix, channel.store.clone())
