"""Checks of what many functions take: a flag, a device."""

from typing import Any

import torch


def check_flag(name: str, value: object) -> None:
    """Refuse what is no bool: the text "False", of a command line say, would count as True."""
    if not isinstance(value, bool):
        msg = f"`{name}` must be True or False, but is {value!r}"
        raise TypeError(msg)


def checked_device(device: Any) -> torch.device:
    """Return the device that is meant.

    Raises:
        RuntimeError: where there is none such on this machine.
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:  # the last two are torch's, too
        why = str(error).partition("\n")[0]
        msg = f"`device` must be one that this machine has, but is {str(device)!r}: {why}"
        raise RuntimeError(msg) from error
    return found
