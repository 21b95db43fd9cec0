"""Where in the user's own code a call was made, an exception raised, or a thread is."""

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
_GENERATED = ("torchinductor_", "<eval_with_key")  # in names of files of torch.compile and fx


class Call(NamedTuple):
    """One of the calls that a thread is in: whose code it is ("" the user's own), and where."""

    whose: str
    place: str
    function: str


def call_site() -> str:
    """Return file and line of the user's call that led here, innermost first. Reads no file."""
    return _users_place(calls_of(sys._getframe(1)))  # noqa: SLF001  # inspect's reads files


def raise_site(error: BaseException) -> str:
    """Return file and line of the user's code in which `error` came up."""
    return _users_place(_calls(traceback.walk_tb(error.__traceback__)))


def calls_of(frame: FrameType) -> list[Call]:
    """Return the calls that the thread of `frame` is in, outermost first. Reads no file."""
    return _calls(traceback.walk_stack(frame))[::-1]


def own_call(calls: Sequence[Call]) -> int:
    """Return which call is the innermost of the user's own code; else of a package, else of all."""
    kinds = [(call.whose == "", call.whose not in _LIBRARIES) for call in calls]
    return max(range(len(calls)), key=lambda n: (kinds[n], n))


def standing(calls: Sequence[Call]) -> str:
    """Return the user's line in which a thread is, and the innermost of all in brackets."""
    own, last = calls[own_call(calls)], calls[-1]
    return own.place if own is last else f"{own.place} ({last.function}, {last.place})"


def _users_place(calls: Sequence[Call]) -> str:
    """Return where the innermost call is that is in none of the libraries, else of all."""
    users = [call for call in calls if call.whose not in _LIBRARIES] or calls
    return users[-1].place if users else "an unknown line"


def _calls(frames: Iterable[tuple[FrameType, int]]) -> list[Call]:
    calls = []
    for frame, line in frames:
        whose, file = _source(frame.f_code.co_filename)
        place = f"{file if whose else _short(file)}:{line}"
        calls.append(Call(whose, place, frame.f_code.co_name))
    return calls


def _short(file: str) -> str:
    with suppress(OSError):  # the folder in which we are is gone
        return file.removeprefix(f"{Path.cwd()}{os.sep}")
    return file


@functools.cache
def _source(file: str) -> tuple[str, str]:
    """Return whose code a file is, "" for the user's own, and its path in that of others."""
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
