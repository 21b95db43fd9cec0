"""What one rank does for all, and waiting for each other, without ever hanging in silence."""

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from pardata._validation import checked_timeout
from pardata.collectives._all_gather import pickled, unpickled
from pardata.collectives._consensus import agree
from pardata.environment._world import World, channel, require_world
from pardata.store._client import Channel
from pardata.store._current_op import doing
from pardata.store._remote_error import Failure
from pardata.store._round import Turn, call_off, refuse_within

_T = TypeVar("_T")
_P = ParamSpec("_P")

_HOURS = timedelta(hours=2)
_MOST = 2**26  # bytes of a result


def barrier(name: str = "", timeout: timedelta | float | None = None) -> None:
    """Wait until every rank is here. Collective; returns at once in a single process.

    It waits on the group's store and not in a collective of the backend. So it can say who is
    missing, and the group is usable afterwards. It does not wait for work queued on a GPU.

    Args:
        name: shown in errors. Ranks that wait at barriers of different names get an error.
        timeout: seconds or a `timedelta`; the group's own if not given.

    Raises:
        TypeError: `timeout` is no time.
        ValueError: `timeout` is not more than 0.
        TimeoutError: ranks did not come; it names them.
        RuntimeError: other ranks are in another call.

    >>> barrier("data is ready")
    """
    patience = None if timeout is None else checked_timeout(timeout)
    here = require_world("barrier")
    agree(here, f"barrier({name!r})" if name else "barrier()", lambda: None, timeout=patience)


@contextmanager
def rank_zero_first(*, local: bool = False, timeout: timedelta | float = _HOURS) -> Iterator[None]:
    """Run a block on rank 0 first and on the other ranks once it is done there, as for a download.

    An exception on rank 0, ``SystemExit`` and ``KeyboardInterrupt`` included, is raised on every
    rank, with its origin. The other ranks do not run the block then. Collective; in a single
    process the block simply runs.

    Args:
        local: let the first rank *of each node* go first, once all ranks are here. This is for
            files on disks that nodes do not share.
        timeout: how long the others wait, in seconds or a `timedelta`. It is long on purpose and
            independent of the group's, within which they notice that the host of the group's store
            is gone.

    Raises:
        TimeoutError: rank 0 took too long; raised on the waiting ranks.
        RuntimeError: other ranks are in another call.

    >>> with rank_zero_first(local=True):
    ...     pass  # download, unless the files are there
    """
    patience = checked_timeout(timeout)
    here = require_world("rank_zero_first")
    if here.size == 1:
        yield
        return
    call, turns = "rank_zero_first", channel()
    if local:
        call = "rank_zero_first(local=True)"
        agree(here, call, lambda: None, timeout=patience)
        turns = _of_node(turns, here.node_rank, here.local_rank, here.local_size)
    turn = Turn(turns, call)
    if turns.rank == 0:
        with _led(turn, "rank_zero_first", here.rank):
            yield
        turn.tell(decision=None)
    else:
        turn.decision(turn.heard(patience))
        yield


def _of_node(group: Channel, node: int, rank: int, size: int) -> Channel:
    """Return the channel of a node, which has turns of its own and other numbers of ranks."""
    return Channel(dist.PrefixStore(f"node{node}", group.store), group.timeout, rank, size)


def call_off_everywhere(here: World, group: Channel, news: str) -> None:
    """Let all who wait for this rank, or for the first one of their node, read `news` instead."""
    call_off(group, news)
    # A first one that was killed cannot say so, and who notices may be on another node.
    if group.store.add("nodes are told", 1) == 1:
        for node in range(here.num_nodes):
            call_off(_of_node(group, node, 0, 1), news)


def rank_zero_call(fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run ``fn(*args, **kwargs)`` on rank 0 only and return its result on every rank.

    The result travels by pickle over the group's store, so it should be small, and must be at most
    64 MiB; `broadcast` takes more. On the other ranks its tensors come on the CPU, whatever device
    they were on. An exception on rank 0, ``SystemExit`` and ``KeyboardInterrupt`` included, is
    raised on every rank, with its origin. Where the exception itself is larger than 64 KiB the
    others raise a `RuntimeError` with its text. Collective; in a single process it is a plain call.

    Args:
        fn: what to run.
        args: handed to it.
        kwargs: handed to it.

    Raises:
        ValueError: the result is too large; raised on every rank.
        TimeoutError: rank 0 took more than two hours; raised on the waiting ranks.
        RuntimeError: other ranks are in another call, or pass another function.

    >>> rank_zero_call(sorted, [2, 1])
    [1, 2]
    """
    here = require_world("rank_zero_call")
    if here.size == 1:
        return fn(*args, **kwargs)
    if doing.leads == "rank_zero_call":  # the others wait for the outer one
        refuse_within("rank_zero_call")
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    turn = Turn(channel(), f"rank_zero_call({name})")
    if not here.is_main:
        received: _T = unpickled(base64.b64decode(turn.decision(turn.heard(_HOURS))))
        return received
    with _led(turn, "rank_zero_call", here.rank):
        result = fn(*args, **kwargs)
        data = pickled(result)
        if len(data) > _MOST:
            raise ValueError(
                f"what `rank_zero_call` returns must be at most {_MOST >> 20} MiB, but is "
                f"{len(data) / 2**20:.1f}: return less, as a path, or send it by `broadcast`"
            )
    turn.tell(decision=base64.b64encode(data).decode())
    return result


@contextmanager
def _led(turn: Turn, call: str, rank: int) -> Iterator[None]:
    """Lead a turn: tell the waiting ranks of any exception, and raise it again."""
    turn.come()
    before, doing.leads = doing.leads, call
    try:
        yield
    except BaseException as error:
        failure = Failure.of(error, rank=rank, call=call)
        with suppress(Exception):  # the first error says more
            turn.tell(failed=[asdict(failure)])
        raise
    finally:
        doing.leads = before
