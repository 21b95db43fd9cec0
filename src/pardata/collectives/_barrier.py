"""Barriers, and sections that rank 0 runs alone, over the group's store."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from pardata._validation import check_text, to_timedelta
from pardata.collectives._all_gather import broadcast_bytes, deserialize, serialize
from pardata.environment._world import group_state, require_world, store_client
from pardata.store._round import exchange, lead

_T = TypeVar("_T")
_P = ParamSpec("_P")

_HOURS = timedelta(hours=2)


def barrier(name: str = "", timeout: timedelta | float | None = None) -> None:
    """Wait until every rank is here. Collective; returns at once in a single process.

    It waits on the group's store and not in a collective of the backend, so it can name the ranks
    that are missing. It does not wait for work queued on a GPU. After a timeout no call that waits
    on the store can follow in this group.

    Args:
        name: shown in errors. Ranks that wait at barriers of different names get an error.
        timeout: seconds or a `timedelta`; the group's own if not given.

    Raises:
        TypeError: `name` is no text (the timeout is the second argument), or `timeout` is no time.
        ValueError: `timeout` is not more than 0.
        TimeoutError: ranks did not come; it names them.
        RuntimeError: other ranks are in another call.

    >>> barrier("data is ready")
    """
    check_text("name", name)
    patience = None if timeout is None else to_timedelta(timeout)
    require_world("barrier")
    call = f"barrier({name!r})" if name else "barrier()"
    exchange(store_client(), call, lambda: None, timeout=patience)


@contextmanager
def rank_zero_first(*, local: bool = False, timeout: timedelta | float = _HOURS) -> Iterator[None]:
    """Run a block on rank 0 first and on the other ranks once it is done there, as for a download.

    An exception on rank 0, ``SystemExit`` and ``KeyboardInterrupt`` included, is raised on every
    rank, with its origin. The other ranks do not run the block then. Collective; in a single
    process the block simply runs.

    Args:
        local: let the first rank *of each node* go first. The others follow once all of these are
            done. This is for files on disks that nodes do not share.
        timeout: how long the others wait, in seconds or a `timedelta`. It is long on purpose and
            independent of the group's, within which they notice that the host of the group's store
            is gone.

    Raises:
        TimeoutError: rank 0 took too long; raised on the waiting ranks.
        RuntimeError: other ranks are in another call. Or nothing says which ranks are on one node,
            because the group was made without `init`.

    >>> with rank_zero_first(local=True):
    ...     pass  # download, unless the files are there
    """
    patience = to_timedelta(timeout)
    world = require_world("rank_zero_first")
    if world.size == 1:
        yield
        return
    client = store_client()
    call = "rank_zero_first(local=True)" if local else "rank_zero_first"
    if local and group_state() is None and "LOCAL_WORLD_SIZE" not in os.environ:
        raise RuntimeError(
            f"`{call}` must know the ranks of a node: call `pardata.init()`, which adopts the group"
        )
    is_first = world.local_rank == 0 if local else world.rank == 0
    if is_first:
        with lead(client, call):
            yield
    exchange(client, call, lambda: None, timeout=patience)
    if not is_first:
        yield


def rank_zero_call(fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run ``fn(*args, **kwargs)`` on rank 0 only and return its result on every rank.

    The result travels by pickle, as `broadcast` sends it. On the other ranks its tensors come on
    the CPU, whatever device they were on. An exception on rank 0, ``SystemExit`` and
    ``KeyboardInterrupt`` included, is raised on every rank, with its origin. Where the exception
    itself is larger than 64 KiB the others raise a `RuntimeError` with its text. Collective; in a
    single process it is a plain call.

    Args:
        fn: what to run.
        args: handed to it.
        kwargs: handed to it.

    Raises:
        TimeoutError: rank 0 took more than two hours; raised on the waiting ranks.
        RuntimeError: other ranks are in another call, or pass another function.

    >>> rank_zero_call(sorted, [2, 1])
    [1, 2]
    """
    world = require_world("rank_zero_call")
    if world.size == 1:
        return fn(*args, **kwargs)
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    client, call = store_client(), f"rank_zero_call({name})"
    result: Any = None
    data = bytearray()
    if world.is_main:
        with lead(client, call):
            result = fn(*args, **kwargs)
            data = serialize(result)
    exchange(client, call, lambda: None, timeout=_HOURS)
    data = broadcast_bytes("rank_zero_call", lambda: data)
    received: _T = result if world.is_main else deserialize(data)
    return received
