"""Bytes that are on the disk, and not only on their way to it."""

import os
from pathlib import Path
from typing import Any

import torch


def save(thing: Any, path: Path) -> None:
    """Write as ``torch.save`` does, and raise an `OSError` where the disk is full.

    PyTorch raises a `RuntimeError` then, about positions in the file.
    """
    with path.open("wb") as file:
        try:
            torch.save(thing, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def sync(*paths: Path) -> None:
    """Wait until files, and the names in directories, are on the disk."""
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
