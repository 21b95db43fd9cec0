"""Checks of what many functions take: a module, a dataset, a flag, a device."""

from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset


def kind_of(value: object) -> str:
    """Return the name of a value's type with its article, for messages: "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def check_module(model: object) -> None:
    """Refuse what is no module."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else None
        got = what or kind_of(model)
        raise TypeError(f"`model` must be a torch.nn.Module, but is {got}")


def check_map_style(dataset: object, otherwise: str) -> None:
    """Refuse what has no samples with numbers, and a class where an object of it is meant.

    `otherwise` follows what it must have in the message.
    """
    if isinstance(dataset, type):
        raise TypeError(
            f"`dataset` must be a dataset, but is the class {dataset.__name__}: pass an object "
            f"of it"
        )
    has_both = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not has_both:  # which inherits the first
        raise TypeError(
            f"`dataset` must have __getitem__ and __len__{otherwise}, but "
            f"{type(dataset).__name__} has not: write a map-style dataset, whose samples have "
            f"numbers that can be shared out"
        )


def check_flag(name: str, value: object) -> None:
    """Refuse what is no bool: the text "False", of a command line say, would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, but is {value!r}")


def check_integer(name: str, value: object, *, least: int | None = None, why: str = "") -> None:
    """Refuse what is no integer, as a bool or a float, and what is below `least`.

    `why` follows the bound in the message, to say where it comes from.
    """
    at_least = "" if least is None else f" of at least {least}{why}"
    cure = "whole number" if least is None else f"whole number from {least} up"
    msg = f"`{name}` must be an integer{at_least}, but is {value!r}: pass a {cure}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(msg)
    if least is not None and value < least:
        raise ValueError(msg)


def checked_timeout(timeout: Any) -> timedelta:
    """Return how long to wait: what is given in seconds, or as a `timedelta`."""
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(
            f"`timeout` must be seconds or a datetime.timedelta, but is {timeout!r}: pass 300, say"
        )
    if not 0 < seconds < 1e8:  # torch's stores take 0 for no end, and no more than some three years
        raise ValueError(
            f"`timeout` must be more than 0 seconds, up to three years, but is {seconds:g}"
        )
    return timedelta(seconds=seconds)


def checked_device(device: Any) -> torch.device:
    """Return the device that is meant, with its number: of "cuda" that of the current one.

    Raises:
        RuntimeError: where there is none such on this machine.
    """
    try:
        return torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, TypeError) as error:  # the last two are torch's, too
        why = str(error).partition("\n")[0]
        raise RuntimeError(
            f"`device` must be one that this machine has, but is {str(device)!r}: {why}"
        ) from error
