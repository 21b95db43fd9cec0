"""What one rank does for all, and waiting for each other, without ever hanging in silence."""

import base64
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from typing_extensions import TypeVarTuple, Unpack

from pardata.ranks import _store
from pardata.ranks._arguments import check_timeout
from pardata.ranks._call_site import call_site
from pardata.ranks._failure import Failure
from pardata.ranks._store import Channel
from pardata.ranks._world import World, channel, require_world

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_HOURS = timedelta(hours=2)


def barrier(name: str = "", timeout: timedelta | None = None) -> None:
    """Wait until every rank is here. Collective; returns at once in a single process.

    Waits on the group's store and not in a collective of the backend, so it can say who is
    missing, and the group is usable afterwards. It does not wait for work queued on a GPU.

    Args:
        name: shown in errors; ranks that wait at barriers of different names are told.
        timeout: the group's own if not given.

    Raises:
        TypeError: for a `timeout` that is no `timedelta`.
        ValueError: for one that is not more than 0.
        TimeoutError: names the ranks that did not come.
        RuntimeError: where other ranks are in another call.

    >>> barrier("data is ready")
    """
    if timeout is not None:
        check_timeout(timeout)
    here = require_world("barrier")
    if here.size > 1:
        line = channel()
        place = f"barrier({name!r})" if name else "barrier()"
        _store.exchange(line, here, place, "", line.timeout if timeout is None else timeout)


@contextmanager
def rank_zero_first(*, local: bool = False, timeout: timedelta = _HOURS) -> Iterator[None]:
    """Run a block on rank 0 first and on the other ranks once it is done there, as for a download.

    An exception on rank 0, ``SystemExit`` and ``KeyboardInterrupt`` included, is raised on every
    rank, with its origin, and the other ranks do not run the block. Collective; in a single
    process the block simply runs.

    Args:
        local: let the first rank *of each node* go first, for files on disks that nodes do not
            share.
        timeout: how long the others wait. Long on purpose and independent of the group's, within
            which they notice that the host of the group's store is gone.

    Raises:
        TimeoutError: on the waiting ranks.

    >>> with rank_zero_first(local=True):
    ...     pass  # download, unless the files are there
    """
    check_timeout(timeout)
    here = require_world("rank_zero_first")
    section = _Section(here, "rank_zero_first", local=local)
    if here.size == 1:
        yield
    elif section.leads:
        with section.reporting():
            yield
        section.publish_result(None)
    else:
        section.collect_result(timeout)
        yield


def rank_zero_call(
    fn: Callable[[Unpack[_Args]], _T], *args: Unpack[_Args], timeout: timedelta = _HOURS
) -> _T:
    """Run ``fn(*args)`` on rank 0 only and return its result on every rank.

    The result travels by pickle over the group's store: for small things. An exception on rank 0,
    ``SystemExit`` and ``KeyboardInterrupt`` included, is raised on every rank, with its origin.
    Collective; in a single process it is a plain call.

    Args:
        fn: what to run.
        args: handed to it.
        timeout: how long the others wait; see `rank_zero_first`.

    Raises:
        TimeoutError: on the waiting ranks.
        RuntimeError: on a rank that calls it with another function than rank 0.

    >>> rank_zero_call(sorted, [2, 1])
    [1, 2]
    """
    check_timeout(timeout)
    here = require_world("rank_zero_call")
    if here.size == 1:
        return fn(*args)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    section = _Section(here, "rank_zero_call", local=False, what=name)
    if not section.leads:
        collected: _T = section.collect_result(timeout)
        return collected
    with section.reporting():
        result = fn(*args)
        data = pickle.dumps(result)
        pickle.loads(data)  # noqa: S301  # fail here, with the cause, and not on the other ranks
    section.publish_result(data)
    return result


class _Section:
    """One rank runs, the others wait for its outcome. The n-th section of a kind meets the n-th."""

    def __init__(self, here: World, place: str, *, local: bool, what: str = "") -> None:
        self._here = here
        self._place = place
        self._what = what
        self.leads = here.is_local_main if local else here.is_main
        self._readers = (here.local_size if local else here.size) - 1
        if here.size > 1:
            self._line = channel()
            scope = _local(place, here) if local else place
            # The counter lives in the store: no state of our own to get out of step.
            turn = _store.next_turn(self._line, scope, here.rank)
            self._key = f"{scope}/{turn}"

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell the waiting ranks of any exception, then let it go on."""
        try:
            yield
        except BaseException as error:
            failure = Failure.of(error, rank=self._here.rank, place=self._place)
            self._publish({"failure": failure.to_json()})
            raise

    def publish_result(self, data: bytes | None) -> None:
        """Let the waiting ranks go on."""
        encoded = None if data is None else base64.b64encode(data).decode()
        self._publish({"result": encoded})

    def _publish(self, outcome: dict[str, str | None]) -> None:
        if self._readers:
            _store.publish(self._line, self._key, json.dumps({**outcome, "what": self._what}))

    def collect_result(self, timeout: timedelta) -> Any:
        """Wait for the leading rank; return its result or raise its exception."""
        text = _store.collect(self._line, self._key, self._readers, self._place, timeout)
        outcome = json.loads(text)
        if "called off" in outcome:
            must = f"rank 0 must finish its `{self._place}`"
            raise _store.called_off(self._place, must, outcome["called off"], call_site())
        if outcome["what"] != self._what:
            msg = (
                f"every rank must make the same calls in the same order, but rank 0 is in "
                f"`{self._place}` of {outcome['what']} and rank {self._here.rank} in that of "
                f"{self._what}: look for a branch that skips one"
            )
            raise RuntimeError(msg)
        if "failure" in outcome:
            Failure.from_json(outcome["failure"]).reraise()
        if outcome["result"] is None:
            return None
        return pickle.loads(base64.b64decode(outcome["result"]))  # noqa: S301  # rank 0's bytes


def call_off(line: Channel, here: World, news: str) -> None:
    """Let all who wait, now or later, for this rank to lead a section read `news` instead."""
    scopes = ["rank_zero_first", "rank_zero_call"] if here.is_main else []
    if here.is_local_main:
        scopes.append(_local("rank_zero_first", here))
    for scope in scopes:
        turn = line.store.add(f"{scope}/turn/{here.rank}", 0) + 1
        _store.publish(line, f"{scope}/{turn}", json.dumps({"called off": news}))


def _local(place: str, here: World) -> str:
    return f"{place}/node{here.node_rank}"
