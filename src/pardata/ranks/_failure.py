"""An exception that travels to other processes: as text, and whole only where that is safe.

The first of four files that a failure goes through: it is recorded here, told in a ``_turn``, made
into what those read who wait in a collective by ``collective/_explanation``, and reported, where
nobody catches it, by ``launch/_uncaught``.
"""

import base64
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

_E = TypeVar("_E", bound=BaseException)

_MARK = "_pardata_consequence"


@dataclass(frozen=True)
class Failure:
    """What one rank raised, as plain data that fits in JSON."""

    rank: int
    place: str
    type: str
    text: str
    traceback: str
    pickled: str | None

    @classmethod
    def of(cls, error: BaseException, *, rank: int, place: str) -> "Failure":
        """Describe `error`, raised on `rank` inside `place` (the name of a call)."""
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        pickled = _pickled(error)
        return cls(rank, place, type(error).__qualname__, _text(error), "".join(lines), pickled)

    def summary(self) -> str:
        """Say in one line what went wrong, and where."""
        return f"rank {self.rank} failed in `{self.place}`: {self.type}: {self.text}"

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


def as_consequence(error: _E, short: str = "") -> _E:
    """Mark `error` as coming of what another rank did or did not do, and return it.

    `short` says where it came up, for a line that says what the other rank did.
    """
    vars(error)[_MARK] = short
    return error


def short_text(error: BaseException) -> str:
    """Return what `as_consequence` was told, if anything."""
    return str(vars(error).get(_MARK, ""))


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


def one_line(error: BaseException) -> str:
    """Return type and text of `error`, in one line."""
    first = _text(error).strip().split("\n", 1)[0]
    name = type(error).__qualname__
    return f"{name}: {first}" if first else name


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  # user code, as below; the words are those of `traceback`
        return "<exception str() failed>"


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
