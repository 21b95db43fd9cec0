"""A failure: one record, from the exception to the last line of the log.

It is made here of what a rank raised. A ``_turn`` tells it, or ``collectives/_comm_errors`` leaves
it in the store for ranks that wait in a collective. ``process_group/_shutdown`` logs it on each rank if
the program does not catch the error that comes of it.
"""

import base64
import json
import os
import pickle
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

_E = TypeVar("_E", bound=BaseException)

_MARK = "_pardata_consequence"

# What gloo says, which names a file of its own or is this, and a GPU's backend if it raises.
_LOST = re.compile(r"gloo/|Application timeout caused pair closure|[Tt]imed out waiting \d+ms")
_TIMED_OUT = re.compile(r"[Tt]imed out waiting|wait timeout|operation timeout|Socket Timeout")
_LOST_BY_GPUS = re.compile(r"remote|connection|abort|time", re.IGNORECASE)
# In what torch raises for a worker all that stands above the worker's own error.
_OF_WORKER = re.compile(r"\A\w+: Caught \w+ in .*\n    .*?\n(?=\S)", re.DOTALL)
_MOST = 2**16  # characters of a text that others get, and bytes of a pickled exception
_LINE_LENGTH = 2000


@dataclass(frozen=True)
class Failure:
    """What happened to one rank, as plain data that fits in JSON.

    Attributes:
        rank: whose it is.
        call: the name of the call that the rank was in, if it was in one.
        text: type and text of the exception; in the store, one line that also says where.
        traceback: of the exception, and `pickled` the exception itself if that is safe, if
            other ranks are to raise it. Of what is long a part is left out.
        is_cause: whether the rank failed by itself, and not because another one was gone.
        seconds: how long it was in a collective.
        timed_out: whether it waited there in vain.
    """

    rank: int
    call: str
    text: str
    traceback: str = ""
    pickled: str | None = None
    is_cause: bool = True
    seconds: float = 0.0
    timed_out: bool = False

    @classmethod
    def of(cls, error: BaseException, *, rank: int, call: str) -> "Failure":
        """Describe `error`, raised on `rank` inside `call`, so that others can raise it."""
        trace = _shortened("".join(traceback.format_exception(error)))
        return cls(rank, call, text_of(error), trace, _pickled(error), is_cause=not follows(error))

    @property
    def fault(self) -> str:
        """What a rank that failed first did."""
        where = self.text.removeprefix("KeyboardInterrupt")
        return f"failed first: {where}" if where == self.text else f"was stopped by Ctrl-C{where}"

    def summary(self) -> str:
        """Say what went wrong, and where."""
        return f"rank {self.rank} failed in `{self.call}`: {self.text}"

    def reraise(self) -> NoReturn:
        """Raise this failure here, with its origin as the cause.

        Raises:
            BaseException: the same exception if it can be pickled, else a `RuntimeError`
                with its type and text.
        """
        origin = RuntimeError(f"raised on rank {self.rank} in `{self.call}`:\n\n{self.traceback}")
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
    if isinstance(error, dist.DistBackendError):
        return _LOST_BY_GPUS.search(str(error)) is not None
    return _LOST.search(str(error)) is not None


def is_timeout(error: BaseException) -> bool:
    """Return whether a collective of the backend waited in vain."""
    return _TIMED_OUT.search(str(error)) is not None


def leave_for_torchrun(text: str) -> None:
    """Leave `text` where torchrun looks for what failed, as torch's own `record` does.

    `record` itself would leave the whole traceback, and that only while the error is handled.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):  # what follows matters more
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def text_of(error: BaseException) -> str:
    """Return type and text of `error`, of which the middle is left out if it is very long."""
    try:
        text = str(error).strip()
    except Exception:  # noqa: BLE001  # user code, as below; the words are those of `traceback`
        text = "<exception str() failed>"
    name = type(error).__qualname__
    return f"{name}: {_shortened(text)}" if text else name


def _shortened(text: str) -> str:
    left_out = len(text) - _MOST
    if left_out <= 0:
        return text
    return f"{text[: _MOST // 2]} … ({left_out} characters) … {text[-_MOST // 2 :]}"


def one_line(error: BaseException) -> str:
    """Return the first line of what `text_of` returns, without torch's advice to look elsewhere.

    If it is that of a DataLoader's worker, the line says what the worker raised.
    """
    first = _OF_WORKER.sub("", text_of(error)).partition("\n")[0]
    return first.partition(". This is typically")[0].removesuffix(":")[:_LINE_LENGTH]


def _pickled(error: BaseException) -> str | None:
    # Many exceptions pickle and cannot be unpickled (an __init__ of several arguments), and some
    # come back as another type or without their text. One that holds a whole document, as that of a
    # parser, is too large to be sent.
    try:
        data = pickle.dumps(error)
        back = pickle.loads(data)  # noqa: S301  # our own bytes
        same = type(back) is type(error) and str(back) == str(error) and len(data) <= _MOST
    except Exception:  # noqa: BLE001  # user code runs here: whatever it raises means "text only"
        return None
    return base64.b64encode(data).decode() if same else None
