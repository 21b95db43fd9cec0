"""Where a rank is: the current operation of its training thread, and the user's line in a stack.

The watchdog reads both. Does not see operations of other threads.
"""

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_ident
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch

LOADER = "its loader"  # the operation while a rank waits for a batch
# The call of pardata ("" in the user's code), its start time, and the step of the loader. A plain
# tuple takes half a microsecond less than a class.
OpRecord: TypeAlias = tuple[str, float, Any]


class CurrentOp:
    """The record of the current operation, written by the training thread, read by the watchdog.

    Attributes:
        thread: the id of the training thread; 0 without a watchdog.
        leads: the call in which the other ranks wait for this one, "" outside of one.
        forbids: the reason why a collective call must not be made, "" if it may.
        record: the record of the operation.
    """

    def __init__(self) -> None:
        self.thread, self.leads, self.forbids = 0, "", ""
        self.record: OpRecord = ("", 0.0, None)

    def begin(self) -> None:
        """Make this thread the training thread."""
        self.thread, self.record = get_ident(), ("", monotonic(), None)

    def push(self, call: str) -> OpRecord | None:
        """Start an operation; return the enclosing one, for `pop`."""
        if get_ident() != self.thread:
            return None
        before = self.record
        self.record = (call, monotonic(), before[2])
        return before

    def pop(self, before: OpRecord | None, *step: Any) -> None:
        """End an operation, perhaps with a new step, as progress of the enclosing operation."""
        if before is not None:
            self.record = (before[0], monotonic(), *(step or before[2:]))

    def heartbeat(self) -> None:
        """Record that the operation has made progress."""
        if get_ident() == self.thread:
            self.pop(self.record)


current_op = CurrentOp()


@contextmanager
def forbidding_calls(why: str) -> Iterator[None]:
    """Make each collective call in the block raise; `why` follows its name in the error."""
    before, current_op.forbids = current_op.forbids, why
    try:
        yield
    finally:
        current_op.forbids = before


def check_allowed(call: str) -> None:
    """Raise a `RuntimeError` if the collective `call` is forbidden now."""
    if current_op.forbids:
        raise RuntimeError(f"`{call}` {current_op.forbids}")


_LIBRARIES = ("pardata", "torch", "Python")
_GENERATED = ("torchinductor_", "<eval_with_key")  # in file names of torch.compile and fx


class Frame(NamedTuple):
    """A stack frame: its package ("" for the user's code), its file and line, its function."""

    package: str
    place: str
    function: str


def call_site() -> str:
    """Return the file and line of the user's call into pardata. Reads no file."""
    return _user_place(frames_of(sys._getframe(1)))  # noqa: SLF001  # `inspect` would read files


def raise_location(error: BaseException) -> str:
    """Return the file and line of the user's code that raised `error`."""
    return _user_place([*_frames(traceback.walk_tb(error.__traceback__))])


def frames_of(frame: FrameType) -> list[Frame]:
    """Return the frames of a stack, outermost first. Reads no file."""
    return [*_frames(traceback.walk_stack(frame))][::-1]


def user_frame(frames: Sequence[Frame]) -> int:
    """Return the index of the user's innermost frame, else of the innermost outside libraries."""
    kinds = [(frame.package == "", frame.package not in _LIBRARIES) for frame in frames]
    return max(range(len(frames)), key=lambda n: (kinds[n], n))


def location(frames: Sequence[Frame]) -> str:
    """Return the place of the user's innermost frame, with the innermost of all in brackets."""
    user, last = frames[user_frame(frames)], frames[-1]
    return user.place if user is last else f"{user.place} ({last.function}, {last.place})"


def _user_place(frames: Sequence[Frame]) -> str:
    """Return the place of the innermost frame outside of libraries, else of the last frame."""
    users = [frame for frame in frames if frame.package not in _LIBRARIES] or frames
    return users[-1].place if users else "an unknown line"


def _frames(frames: Iterable[tuple[FrameType, int]]) -> Iterator[Frame]:
    for frame, line in frames:
        package, file = _source(frame.f_code.co_filename)
        place = f"{file if package else _short(file)}:{line}"
        yield Frame(package, place, frame.f_code.co_name)


def _short(file: str) -> str:
    with suppress(OSError):  # the working directory is gone
        return file.removeprefix(f"{Path.cwd()}{os.sep}")
    return file


@functools.cache
def _source(file: str) -> tuple[str, str]:
    """Return the package of a file, "" for the user's code, and its path within the package."""
    for root in Path(__file__).parents[1], Path(torch.__file__ or __file__).parent:
        if Path(file).is_relative_to(root):
            return root.name, str(Path(file).relative_to(root.parent))
    _, is_installed, inside = file.rpartition(f"-packages{os.sep}")
    if is_installed:
        return Path(inside).parts[0].removesuffix(".py"), inside
    if any(word in file for word in _GENERATED):
        return "torch", file
    library = sysconfig.get_paths()["stdlib"] + os.sep
    if file.startswith(("<frozen", library)):
        return "Python", file.removeprefix(library)
    return "", file
