"""An exception of one rank as plain data, so that other ranks can log it, or raise it again."""

import base64
import pickle
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from pardata.store._caller import raise_location

_E = TypeVar("_E", bound=BaseException)

_MARK = "_pardata_secondary"
# The texts of gloo, which name a file of its sources or are one of these. GPUs' have a type.
_LOST_BY_GLOO = re.compile(
    r"gloo/|Application timeout caused pair closure|[Tt]imed out waiting \d+ms"
)
_TIMED_OUT = re.compile(r"[Tt]imed out waiting|wait timeout|operation timeout|Socket Timeout")
_LOST_BY_GPUS = re.compile(r"remote|connection|abort|\btime", re.IGNORECASE)  # no "runtime"
_MOST = 2**16  # characters of a text, and bytes of a pickled exception
_LINE_LENGTH = 2000


@dataclass(frozen=True)
class RemoteError:
    """An exception, and where it was raised; fits in JSON.

    Attributes:
        rank: of the process that raised it.
        call: the name of the call of pardata in which it was raised, "" if in none.
        text: its type and text, and in a failure of the run the line that raised it.
        traceback: of the exception, "" if no other rank raises it.
        pickled: the exception itself, if it survives pickle and is at most 64 KiB.
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
        text = type_and_message(error)
        trace = "".join(traceback.format_exception(error))[-_MOST:]
        return cls(rank, call, text, trace, _pickled(error), is_secondary(error))

    @property
    def summary(self) -> str:
        """Which rank failed, in which call, and how."""
        return f"rank {self.rank} failed in `{self.call}`: {self.text}"

    def to_exception(self) -> BaseException:
        """Return the exception itself if it can be pickled, else a `RuntimeError` with its text.

        Its cause has the traceback.
        """
        error: BaseException = RuntimeError(self.summary)
        if self.pickled is not None:
            error = pickle.loads(base64.b64decode(self.pickled))  # noqa: S301  # of a rank
        origin = f"raised on rank {self.rank} in `{self.call}`:\n\n{self.traceback}"
        error.__cause__ = RuntimeError(origin)
        return error


def mark_secondary(error: _E) -> _E:
    """Mark `error` as caused by another rank's failure, and return it."""
    setattr(error, _MARK, True)
    return error


def is_secondary(error: BaseException) -> bool:
    """Return whether another rank's failure caused `error`, or an error that led to it."""
    return any(hasattr(link, _MARK) or _is_of_backend(link) for link in exception_chain(error))


def is_peer_failure(error: BaseException) -> bool:
    """Return whether the backend raised `error`, because a peer was not in the collective."""
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
    """Return type and text of `error` as Python prints them, of a very long text the beginning."""
    return "".join(traceback.format_exception_only(error)).strip()[:_MOST]


def summary_line(error: BaseException) -> str:
    """Return type, the first line of the text, and the line of the user's code that raised it."""
    first = type_and_message(error).partition("\n")[0].removesuffix(":")[:_LINE_LENGTH]
    return f"{first} ({raise_location(error)})"


def _pickled(error: BaseException) -> str | None:
    # Some exceptions cannot be unpickled (an __init__ with several arguments), or come back as
    # another type or without their text. One that holds a document, as a parser's, is too large.
    try:
        data = pickle.dumps(error)
        back = pickle.loads(data)  # noqa: S301  # our own bytes
        same = type(back) is type(error) and str(back) == str(error) and len(data) <= _MOST
    except Exception:  # noqa: BLE001  # user code runs here: whatever it raises means "text only"
        return None
    return base64.b64encode(data).decode() if same else None
