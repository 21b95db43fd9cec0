"""Where in the user's own code a call was made, or an exception raised."""

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

Place = tuple[FrameType, int]


def call_site() -> str:
    """Return file and line of the user's call that led here, innermost first."""
    # Looked at from the outside in: the innermost of the user's frames is the last.
    return _last_of_the_users(reversed(list(traceback.walk_stack(sys._getframe(1)))))  # noqa: SLF001  # inspect's reads files


def raise_site(error: BaseException) -> str:
    """Return file and line of the user's code in which `error` came up."""
    return _last_of_the_users(traceback.walk_tb(error.__traceback__))


def _last_of_the_users(places: Iterable[Place]) -> str:
    everything = list(places)
    own = [place for place in everything if _is_the_users(place[0].f_code.co_filename)]
    if not everything:
        return "an unknown line"
    frame, line = (own or everything)[-1]
    return f"{_short(frame.f_code.co_filename)}:{line}"


def _is_the_users(file: str) -> bool:
    if file.startswith("<frozen"):
        return False
    ours, library = _folders()
    if file.startswith(ours):
        return False
    return not file.startswith(library) or "-packages" + os.sep in file


@functools.cache
def _folders() -> tuple[tuple[str, ...], str]:
    """Return where pardata and torch are, and Python's own library."""
    package, library = Path(__file__).parents[1], Path(torch.__file__ or __file__).parent
    return (f"{package}{os.sep}", f"{library}{os.sep}"), sysconfig.get_paths()["stdlib"] + os.sep


def _short(file: str) -> str:
    """Return the path as seen from where the process runs, if it is below."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or that folder is gone
        return file
