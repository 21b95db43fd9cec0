"""Files of bare weights: PyTorch's own, and safetensors where they are installed."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def read_weights(path: str | os.PathLike[str]) -> Any:
    """Return what is in a file of weights, on the CPU, without running code.

    Raises:
        OSError: for what cannot be opened.
        RuntimeError: for a file that holds something else, or is damaged.
    """
    tensors = _safetensors(path) if Path(path).suffix == ".safetensors" else None
    try:
        if tensors is not None:
            return tensors.load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        # Of a damaged file, torch and safetensors raise almost anything, and name no file.
        # What torch says after its first sentence is how to run the code in it all the same.
        why = f"{type(error).__name__}: {_first_sentence(error)}"
        msg = (
            f"{os.fspath(path)} must be a file of weights, written by torch.save or as "
            f"safetensors, but cannot be read as one ({why}): is it complete, and does it hold "
            f"nothing but tensors?"
        )
        raise RuntimeError(msg) from error


def write_weights(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state dict to a file that is there as a whole or not at all.

    Raises:
        TypeError: for what is no state dict.
        ImportError: for safetensors that are not installed.
    """
    _check(state)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".unfinished-{path.name}")
    try:
        if path.suffix == ".safetensors":
            # Of tied weights each has its own, as the format wants.
            own = {name: tensor.clone().contiguous() for name, tensor in state.items()}
            _safetensors(path).save_file(own, unfinished)
        else:
            save(state, unfinished)
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


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


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _check(state: object) -> None:
    if isinstance(state, Mapping):
        others = [name for name, value in state.items() if not isinstance(value, Tensor)]
        if not others:
            return
        what = f"has {others[0]!r}, which is none"
    else:
        what = f"is a {type(state).__name__}"
    msg = f"what is exported must be the weights of a module, all of them tensors, but it {what}"
    raise TypeError(msg)


def _safetensors(path: str | os.PathLike[str]) -> Any:
    try:
        import safetensors.torch  # noqa: PLC0415  # pardata does not require it
    except ImportError as error:
        msg = f"{path} needs safetensors, which are not installed: pip install safetensors"
        raise ImportError(msg) from error
    return safetensors.torch


def _first_sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0]
