"""Check and convert arguments of public functions."""

import os
import re
from collections.abc import Collection, Mapping
from datetime import timedelta
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset


def type_with_article(value: object) -> str:
    """Return the type of a value with an article, as "an int", or "the class int" for a class."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def check_module(model: object) -> None:
    """Raise a `TypeError` unless `model` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, but is {type_with_article(model)}")


def check_map_style(dataset: object, otherwise: str) -> None:
    """Raise a `TypeError` for a dataset without indices, and for a class in place of an object.

    `otherwise` follows the requirement in the message.
    """
    has_both = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    is_stream = isinstance(dataset, IterableDataset)  # it inherits `__getitem__`
    if isinstance(dataset, type) or is_stream or not has_both:
        msg = f"`dataset` must have `__getitem__` and `__len__`{otherwise}, but is "
        msg += f"{type_with_article(dataset)}: pass a list, or a Dataset with both"
        raise TypeError(msg)


def vector_of(name: str, values: Any, length: int) -> Tensor:
    """Return `length` numbers as a float64 tensor of shape (length,).

    Raises:
        TypeError, ValueError: they are no numbers ≥ 0 that have a finite sum, or not as many.
    """
    msg = f"`{name}` must be a sequence of numbers, but is {type_with_article(values)}"
    if isinstance(values, Mapping) or not hasattr(values, "__getitem__"):
        raise TypeError(f"{msg}: pass a list or a tensor")
    is_array = isinstance(values, Tensor) or type(values).__module__ == "numpy"
    try:
        given = values if is_array else [float(number) for number in values]
        numbers = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{msg}: {error}") from error
    total, shape = numbers.sum(), tuple(numbers.shape)
    if shape != (length,) or not (numbers >= 0).all() or not total.isfinite():
        least = min(numbers.flatten().tolist(), default=0)
        msg = f"`{name}` must be finite numbers of at least 0, of shape ({length},), but is of "
        raise ValueError(f"{msg}shape {shape}, from {least:g} up, with the sum {total:g}")
    return numbers


def check_bool(name: str, value: object) -> None:
    """Raise a `TypeError` unless `value` is a bool: the text "False" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, but is {value!r}")


def check_text(name: str, value: object) -> None:
    """Raise a `TypeError` unless `value` is a text."""
    if not isinstance(value, str):
        raise TypeError(f"`{name}` must be a text, but is {type_with_article(value)} ({value!r})")


def plain_number(value: Any) -> Any:
    """Return a NumPy number as a Python number, and any other value as it is."""
    is_numpy = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_numpy else value


def check_int(name: str, value: object, *, least: int | None = None, why: str = "") -> int:
    """Return `value` as an int; raise if it is no integer, as a bool or a float, or below `least`.

    `why` follows the bound in the message, as its reason.
    """
    at_least = "" if least is None else f" of at least {least}{why}"
    cure = "a whole number" if least is None else f"a whole number from {least} up"
    msg = f"`{name}` must be an integer{at_least}, but is {value!r}: pass {cure}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(msg)
    if least is not None and value < least:
        raise ValueError(msg)
    return int(value)


def to_timedelta(timeout: Any, name: str = "timeout", *, or_none: bool = False) -> timedelta:
    """Return a timeout in seconds, or a `timedelta`, as a `timedelta`; `or_none` allows 0."""
    seconds = plain_number(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"`{name}` must be seconds or a timedelta, but is {timeout!r}: pass 300")
    # torch's stores wait forever for 0, and take at most about three years.
    if not 0 < seconds < 1e8 and not (or_none and seconds == 0):
        least = "0, which turns it off, or more seconds" if or_none else "more than 0 seconds"
        raise ValueError(f"`{name}` must be {least}, up to three years, but is {seconds:g}")
    return timedelta(seconds=seconds)


def local_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Return an absolute path, which stays the same when the program changes its directory.

    Raise for a URL and for "~": a file system would make folders of these names.
    """
    if not str(path) or str(path).startswith("~"):
        msg = f"`{name}` must be a path, but is {str(path)!r}: pass '.' or os.path.expanduser(path)"
        raise ValueError(msg)
    slashes = "//" if isinstance(path, str) else "/"  # a Path keeps one of the two
    if re.match(rf"[a-zA-Z][\w+.-]+:{slashes}", str(path)):
        raise ValueError(
            f"`{name}` must be on a disk, but is the URL {str(path)!r}: mount it and pass that path"
        )
    return Path(path).absolute()


class FixedArguments:
    """Raises if an argument is assigned after the object was made, which would do nothing."""

    _arguments: ClassVar[Collection[str]]

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._arguments:
            kind = type(self).__name__.lower()
            msg = f"`{name}` of a {kind} must not change to {value!r:.60}: make another {kind}"
            raise AttributeError(msg)
        super().__setattr__(name, value)
