"""What tests on several ranks share."""

import time
from dataclasses import dataclass
from typing import Any

from pardata.testing import run


@dataclass
class Raised:
    """An exception that a rank raised, as a result."""

    type: str
    text: str
    cause: str
    seconds: float


def caught(fn, *args) -> Any:
    """Return what `fn` returns, or the `Raised` of what it raises: for errors on every rank."""
    start = time.monotonic()
    try:
        return fn(*args)
    except BaseException as error:  # noqa: BLE001  # SystemExit too
        seconds = time.monotonic() - start
        return Raised(type(error).__name__, str(error), str(error.__cause__), seconds)


def run_caught(fn, *args, world_size: int, **options) -> list[Any]:
    """Run `fn` on every rank and return what each returned or raised."""
    return run(caught, fn, *args, world_size=world_size, **options)
