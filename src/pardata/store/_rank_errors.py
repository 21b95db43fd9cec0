"""Errors that name ranks: an exception of one rank as plain data, lists and tables of ranks."""

import pickle
import re
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from pardata.store._current_op import raise_location

_E = TypeVar("_E", bound=BaseException)

_MARK = "_pardata_secondary"
# gloo's errors name a file of its sources, or are one of these texts. Those of backends for
# accelerators are a DistBackendError.
_LOST_BY_GLOO = re.compile(
    r"gloo/|Application timeout caused pair closure|[Tt]imed out waiting \d+ms"
)
_TIMED_OUT = re.compile(r"[Tt]imed out waiting|wait timeout|operation timeout|Socket Timeout")
_LOST_BY_GPUS = re.compile(r"remote|connection|abort|\btime", re.IGNORECASE)  # not "runtime"
_MOST = 2**16  # characters of a text, and bytes of a pickled exception
_LINE_LENGTH = 2000
_LONG = 4  # consecutive ranks from this number on are written as a range


class RemoteError(NamedTuple):
    """An exception and its origin, as values that fit in JSON.

    Attributes:
        rank: the rank that raised it.
        call: the name of the call of pardata that raised it, "" outside of one.
        text: its type and message; for the failure of the run also the line that raised it.
        traceback: the formatted traceback, "" if no other rank raises the error.
        pickled: the pickled exception, if it survives pickling and has at most 64 KiB.
        is_secondary: whether another rank's failure caused it.
    """

    rank: int
    call: str
    text: str
    traceback: str = ""
    pickled: str | None = None
    is_secondary: bool = False

    @classmethod
    def of(cls, error: BaseException, *, rank: int, call: str) -> "RemoteError":
        """Describe `error` so that other ranks can raise it."""
        trace = "".join(traceback.format_exception(error))[-_MOST:]
        return cls(rank, call, type_and_message(error), trace, _pickled(error), is_secondary(error))

    @property
    def summary(self) -> str:
        """Which rank failed, in which call, and how."""
        return f"rank {self.rank} failed in `{self.call}`: {self.text}"

    def to_exception(self) -> BaseException:
        """Return the exception if it was pickled, else a `RuntimeError` with its text.

        Its cause has the traceback.
        """
        error: BaseException = RuntimeError(self.summary)
        if self.pickled is not None:
            error = pickle.loads(bytes.fromhex(self.pickled))  # noqa: S301  # of this run
        origin = f"raised on rank {self.rank} in `{self.call}`:\n\n{self.traceback}"
        error.__cause__ = RuntimeError(origin)
        return error


def mark_secondary(error: _E) -> _E:
    """Mark `error` as caused by another rank's failure, and return it."""
    setattr(error, _MARK, True)
    return error


def is_secondary(error: BaseException) -> bool:
    """Return whether another rank's failure caused `error`, or an exception in its chain."""
    return has_lost_peer(error) or any(hasattr(link, _MARK) for link in exception_chain(error))


def has_lost_peer(error: BaseException) -> bool:
    """Return whether the backend lost a peer, so that no collective of the group can follow."""
    return any(map(_is_of_backend, exception_chain(error)))


def is_peer_failure(error: BaseException) -> bool:
    """Return whether `error` is the backend's, as a peer is gone, and not explained yet."""
    marked = any(hasattr(link, _MARK) for link in exception_chain(error))
    return _is_of_backend(error) and not marked


def _is_of_backend(error: BaseException) -> bool:
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, dist.DistBackendError):
        return _LOST_BY_GPUS.search(str(error)) is not None
    return isinstance(error, RuntimeError) and _LOST_BY_GLOO.search(str(error)) is not None


def is_timeout(error: BaseException) -> bool:
    """Return whether a collective of the backend timed out."""
    return _TIMED_OUT.search(str(error)) is not None


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and its causes or contexts, as a traceback shows them."""
    link: BaseException | None = error
    seen = set[int]()
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def type_and_message(error: BaseException) -> str:
    """Return the type and message of `error`, as Python prints them, at most 64 Ki characters."""
    return "".join(traceback.format_exception_only(error)).strip()[:_MOST]


def summary_line(error: BaseException) -> str:
    """Return the type, the first line of the message, and the user's line that raised `error`."""
    first = type_and_message(error).partition("\n")[0].removesuffix(":")[:_LINE_LENGTH]
    return f"{first} ({raise_location(error)})"


def _pickled(error: BaseException) -> str | None:
    # Some exceptions cannot be unpickled (an __init__ with several arguments), or change their type
    # or text. A parser's may hold a whole document.
    try:
        data = pickle.dumps(error)
        back = pickle.loads(data)  # noqa: S301  # pickled one line above
        same = type(back) is type(error) and str(back) == str(error) and len(data) <= _MOST
    except Exception:  # noqa: BLE001  # the user's pickling may raise anything
        return None
    return data.hex() if same else None


def format_ranks(ranks: Sequence[int]) -> str:
    """Write ``[1]`` as "rank 1" and ``[0, 2, 3, 4, 5]`` as "ranks 0, 2-5"."""
    texts: list[str] = []
    for _, numbered in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in numbered]
        texts += [f"{run[0]}-{run[-1]}"] if len(run) >= _LONG else map(str, run)
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def format_rank_table(lines: Sequence[str]) -> str:
    """Return a table of one text of each rank, with equal texts in one line.

    >>> print(format_rank_table(["length=10", "length=9", "length=10"]))
      ranks 0, 2: length=10
      rank 1: length=9
    """
    sets: dict[str, list[int]] = {}
    for rank, line in enumerate(lines):
        sets.setdefault(line, []).append(rank)
    return "\n".join(f"  {format_ranks(ranks)}: {line}" for line, ranks in sets.items())
