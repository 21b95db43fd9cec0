"""Where in the user's own code a call was made, or an exception raised."""

import functools
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch


def call_site() -> str:
    """Return file and line of the user's call that led here, innermost first."""
    # Looked at from the outside in: the innermost of the user's frames is the last.
    return _last_of_the_users(reversed(list(traceback.walk_stack(sys._getframe(1)))))  # noqa: SLF001  # inspect's reads files


def raise_site(error: BaseException) -> str:
    """Return file and line of the user's code in which `error` came up."""
    return _last_of_the_users(traceback.walk_tb(error.__traceback__))


def _last_of_the_users(places: Iterable[tuple[FrameType, int]]) -> str:
    lines = [(frame.f_code.co_filename, line) for frame, line in places]
    if not lines:
        return "an unknown line"
    file, line = ([place for place in lines if _is_the_users(place[0])] or lines)[-1]
    with suppress(ValueError, OSError):  # elsewhere than we are, or that folder is gone
        file = str(Path(file).relative_to(Path.cwd()))
    return f"{file}:{line}"


@functools.cache
def _is_the_users(file: str) -> bool:
    """Return whether `file` is not of pardata, torch or Python's own library."""
    library = sysconfig.get_paths()["stdlib"] + os.sep
    # Installed packages lie in the library's folder.
    of_python = file.startswith("<frozen") or (file.startswith(library) and "-packages" not in file)
    others = [Path(__file__).parents[1], Path(torch.__file__ or __file__).parent]
    return not of_python and not any(map(Path(file).is_relative_to, others))
