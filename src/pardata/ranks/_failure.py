"""A failure: one record, from the exception to the last line of the log.

It is made here of what a rank raised, told in a ``_turn`` or left in the store for those who wait
in a collective (``collective/_explanation``), and logged on each rank, where nobody catches what
comes of it (``launch/_uncaught``).
"""

import base64
import pickle
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

_E = TypeVar("_E", bound=BaseException)

_MARK = "_pardata_consequence"

# What gloo says, in any version, and NCCL where it raises at all.
_TIMED_OUT = re.compile(r"[Tt]imed out waiting|wait timeout|operation timeout|Socket Timeout")
_LOST = re.compile(
    r"gloo/transport/|Connection (closed|reset) by peer|Application timeout caused pair closure"
)
_LOST_BY_NCCL = re.compile(r"remote|connection|abort|time", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """What happened to one rank, as plain data that fits in JSON.

    Attributes:
        rank: whose it is.
        place: the name of the call that the rank was in, if it was in one.
        text: type and text of the exception; in the store, one line that also says where.
        traceback: of the exception, and `pickled` the exception itself if that is safe, where
            other ranks raise it.
        is_cause: whether the rank failed by itself, and not because another one was gone.
        seconds: how long it was in a collective.
        timed_out: whether it waited there in vain.
    """

    rank: int
    place: str
    text: str
    traceback: str = ""
    pickled: str | None = None
    is_cause: bool = True
    seconds: float = 0.0
    timed_out: bool = False

    @classmethod
    def of(cls, error: BaseException, *, rank: int, place: str) -> "Failure":
        """Describe `error`, raised on `rank` inside `place`, so that others can raise it."""
        trace = "".join(traceback.format_exception(error))
        return cls(rank, place, text_of(error), trace, _pickled(error), is_cause=not follows(error))

    def summary(self) -> str:
        """Say what went wrong, and where."""
        return f"rank {self.rank} failed in `{self.place}`: {self.text}"

    def reraise(self) -> NoReturn:
        """Raise this failure here, with its origin as the cause.

        Raises:
            BaseException: the same exception where it can be pickled, else a `RuntimeError`
                with its type and text.
        """
        origin = RuntimeError(f"raised on rank {self.rank} in `{self.place}`:\n\n{self.traceback}")
        if self.pickled is None:
            raise as_consequence(RuntimeError(self.summary())) from origin
        # No name is given to it here: held by a frame of its own it would outlive who catches it.
        raise as_consequence(pickle.loads(base64.b64decode(self.pickled))) from origin  # noqa: S301  # a rank's


def as_consequence(error: _E, short: str = "", known: object = None) -> _E:
    """Mark `error` as coming of what another rank did or did not do, and return it.

    Args:
        error: what will be raised.
        short: where it came up, for a line that says what the other rank did.
        known: what is known of the others, for who reports it.
    """
    vars(error)[_MARK] = short, known
    return error


def consequence(error: BaseException) -> Any:
    """Return what `as_consequence` was told of `error`: where it came up, and what is known."""
    return vars(error).get(_MARK, ("", None))


def follows(error: BaseException) -> bool:
    """Return whether `error` comes of what another rank did: by its kind, for clocks differ."""
    return is_consequence(error) or any(is_lost(link) for link in chain(error))


def is_consequence(error: BaseException) -> bool:
    """Return whether `error`, or what it came of, is marked so."""
    return any(_MARK in vars(link) for link in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and what it came of, as a traceback shows them."""
    link: BaseException | None = error
    seen = set[int]()
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def is_lost(error: BaseException) -> bool:
    """Return whether `error` is the backend's own: that a peer was not in the collective."""
    if not isinstance(error, RuntimeError) or is_consequence(error):
        return False
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    pattern = _LOST_BY_NCCL if isinstance(error, dist.DistBackendError) else _LOST
    return pattern.search(str(error)) is not None or is_timeout(error)


def is_timeout(error: BaseException) -> bool:
    """Return whether a collective of the backend waited in vain."""
    return _TIMED_OUT.search(str(error)) is not None


def text_of(error: BaseException) -> str:
    """Return type and text of `error`."""
    try:
        text = str(error).strip()
    except Exception:  # noqa: BLE001  # user code, as below; the words are those of `traceback`
        text = "<exception str() failed>"
    name = type(error).__qualname__
    return f"{name}: {text}" if text else name


def one_line(error: BaseException) -> str:
    """Return the first line of what `text_of` returns, without torch's advice to look elsewhere.

    Of an error that has a table below its first line, what it says below the table, too: the cure.
    """
    first, *below = text_of(error).split("\n")
    if first.endswith(":") and below and not below[-1].startswith(" "):
        first = f"{first} {below[-1]}"
    return first.split(". This is typically")[0]


def _pickled(error: BaseException) -> str | None:
    # Many exceptions pickle and cannot be unpickled (an __init__ of several arguments), and some
    # come back as another type or without their text.
    try:
        data = pickle.dumps(error)
        back = pickle.loads(data)  # noqa: S301  # our own bytes
        same = type(back) is type(error) and str(back) == str(error)
    except Exception:  # noqa: BLE001  # user code runs here: whatever it raises means "text only"
        return None
    return base64.b64encode(data).decode() if same else None
