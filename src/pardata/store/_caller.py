"""Finds the user's line in a stack or a traceback."""

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

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
    return _user_place(_frames(traceback.walk_tb(error.__traceback__)))


def frames_of(frame: FrameType) -> list[Frame]:
    """Return the frames of a stack, outermost first. Reads no file."""
    return _frames(traceback.walk_stack(frame))[::-1]


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


def _frames(frames: Iterable[tuple[FrameType, int]]) -> list[Frame]:
    found = []
    for frame, line in frames:
        package, file = _source(frame.f_code.co_filename)
        place = f"{file if package else _short(file)}:{line}"
        found.append(Frame(package, place, frame.f_code.co_name))
    return found


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
