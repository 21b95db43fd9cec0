"""What is read at this moment, for who looks for a hang: here, and as each worker leaves it."""

import ctypes
import reprlib
from collections.abc import Sequence
from multiprocessing.sharedctypes import RawArray
from time import monotonic
from types import CodeType, FrameType
from typing import Any

from pardata.data._order import as_list
from pardata.data._reader import Reader
from pardata.data._stream import Stream
from pardata.messages._call_site import calls_of, standing
from pardata.ranks._machine import state_of

EACH = 1.0  # seconds after which a worker leaves where it is
_LENGTH = 500  # bytes of a text
_LOOP = "_worker_loop"  # PyTorch's: around it a forked worker has the calls of its rank

# Where samples are read, the name of what says which: looked up when asked, so it takes no time.
_READS: dict[CodeType, str] = {
    Reader._samples.__code__: "index",  # noqa: SLF001  # a public name would be for this alone
    Reader._got.__code__: "indices",  # noqa: SLF001  # a public name would be for this alone
    Stream._seeded.__code__: "number",  # noqa: SLF001  # a public name would be for this alone
}


class _Row(ctypes.Structure):
    """What a worker leaves, and when, by the clock of the machine."""

    _fields_ = (("time", ctypes.c_double), ("text", ctypes.c_char * _LENGTH))


def rows_for(workers: int) -> Any:
    """Return memory that a rank shares with so many workers."""
    return RawArray(_Row, workers)


def leave(row: Any, frame: FrameType) -> None:
    """Leave what this worker does, by the innermost frame of the thread that reads."""
    calls = calls_of(frame)
    around = max((n for n, call in enumerate(calls[:-1]) if call.function == _LOOP), default=-1)
    text = f"{read_in(frame) or 'is'} at {standing(calls[around + 1 :])}"
    row.text, row.time = text.encode()[: _LENGTH - 1], monotonic()


def left(row: Any, pid: int) -> str:
    """Return what a worker has left, and what its process does if that was long ago."""
    text = row.text.decode(errors="replace") or "has read nothing yet"
    is_new = monotonic() - row.time < 3 * EACH
    return text if is_new else f"{text}, and whose process {pid} {state_of(pid)}"


def read_in(frame: FrameType | None) -> str:
    """Say what is read in the thread of this innermost frame; "" if nothing is."""
    while frame is not None and frame.f_code not in _READS:
        frame = frame.f_back
    names = {} if frame is None else frame.f_locals
    if frame is None or _READS[frame.f_code] not in names:  # it reads no sample yet
        return ""
    which, dataset = as_list(names[_READS[frame.f_code]]), names["self"].dataset
    several = "s" if isinstance(which, Sequence) and not isinstance(which, str) else ""
    return f"reads sample{several} {reprlib.repr(which)} of {type(dataset).__name__}"
