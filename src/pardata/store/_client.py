"""A client of the process group's key-value store. Every request has a deadline."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias, TypeVar

import torch.distributed as dist

from pardata.store._current_op import call_site
from pardata.store._rank_errors import mark_secondary

_T = TypeVar("_T")
Requests: TypeAlias = SimpleQueue[Callable[[], None] | None]  # None ends the thread

SERVER = "the process that serves the group's store (rank 0, or torchrun's agent)"
# Seconds that a request may take in addition to its wait, because a loaded server is slow. A server
# that has ended is noticed at once; a stopped one, or a broken network, after this margin.
_MARGIN = 10.0


@dataclass(eq=False)
class StoreClient:
    """One rank's connection to the store.

    Attributes:
        store: the store.
        timeout: the default timeout of waits for other ranks.
        rank: of this process.
        size: number of ranks.
        rounds: number of rounds (see ``_round``) that this rank has started.
        closed: the reason why no round can follow, "" if there is none.
        thread: the thread of all collective calls: of the last `init`, or else of the first call.
    """

    store: dist.Store
    timeout: timedelta
    rank: int
    size: int
    rounds: int = 0
    closed: str = ""
    thread: Thread | None = None
    _requests: Requests | None = field(default=None, init=False)  # to the client's thread
    _is_held: bool = field(default=False, init=False)  # an unfinished request has the connection

    def request(self, work: Callable[[dist.Store], _T], wait: timedelta = timedelta(0)) -> _T:
        """Return ``work(store)``, which may wait for other ranks for `wait`.

        It runs in the client's thread, so that Ctrl-C and the deadline work: torch waits forever
        for a store whose process is stopped (pytorch/pytorch#129367). An unfinished request holds
        the lock of its connection, so the next one opens a new connection, in a new thread.

        Raises:
            TimeoutError: the store does not answer.
            RuntimeError: the store has ended.
        """
        answer, before, held = Future[tuple[dist.Store, _T]](), self.store, self._is_held

        def run() -> None:
            try:
                store = before.clone() if held else before
                answer.set_result((store, work(store)))
            except BaseException as error:  # noqa: BLE001  # raised in the calling thread
                answer.set_exception(error)

        try:
            (self._requests or self._start_thread()).put(run)
            self.store, found = answer.result(wait.total_seconds() + _MARGIN)
            held = False
        except dist.DistNetworkError as error:
            must = "must stay as long as any rank, but has ended: see its output; this rank is at"
            raise mark_secondary(RuntimeError(f"{SERVER} {must} {call_site()}")) from error
        except TimeoutError:
            must = f"must answer, but has not for {wait}: is it stopped, or is the network down?"
            raise mark_secondary(TimeoutError(f"{SERVER} {must} {call_site()}")) from None
        else:
            return found
        finally:
            self._is_held = held or not answer.done()
            if self._is_held:
                with suppress(RuntimeError):  # at the interpreter's exit Python 3.12 starts none
                    self._start_thread()

    def __del__(self) -> None:
        if self._requests is not None:
            self._requests.put(None)

    def _start_thread(self) -> Requests:
        """Start the thread of all further requests; an earlier one ends after its request."""
        self.__del__()
        self._requests, requests = None, Requests()
        Thread(target=_serve, args=[requests], daemon=True).start()
        self._requests = requests
        return requests


def _serve(requests: Requests) -> None:
    while (run := requests.get()) is not None:
        run()
        del run  # it holds the answer


def wait_for(store: dist.Store, keys: list[str], timeout: timedelta) -> bool:
    """Wait for all `keys`; return whether they were set before the timeout."""
    try:
        store.wait(keys, timeout)
    except dist.DistNetworkError:
        raise
    except RuntimeError:
        return False
    return True


def set_once(store: dist.Store, key: str, text: str) -> str:
    """Set a key unless it is set; return its value, which may be another rank's."""
    found: str = store.compare_set(key, "", text).decode()
    if found == text:
        store.set(key, text)  # only `set` wakes waiting clients of a TCPStore without libuv
    return found


def multi_get_or_none(store: dist.Store, keys: list[str]) -> list[str | None]:
    """Return the values of `keys`, None for a key that is not set."""
    present = keys if store.check(keys) else [key for key in keys if store.check([key])]
    texts = dict(zip(present, store.multi_get(present), strict=True)) if present else {}
    return [texts[key].decode() if key in texts else None for key in keys]


def append(store: dist.Store, key: str, line: str) -> None:
    """Append a line to the value of `key`."""
    store.append(key, f"{line}\n")  # type: ignore[attr-defined]  # missing in torch's stubs
