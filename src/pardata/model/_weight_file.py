"""Files of bare weights: PyTorch's own, and safetensors where they are installed."""

import os
from pathlib import Path
from typing import Any

import torch


def read_weights(path: str | os.PathLike[str]) -> Any:
    """Return what is in a file of weights, on the CPU, without running code.

    Raises:
        OSError: for what cannot be opened.
        RuntimeError: for a file that holds something else, or is damaged.
    """
    tensors = safetensors_for(path) if Path(path).suffix == ".safetensors" else None
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


def safetensors_for(path: str | os.PathLike[str]) -> Any:
    """Return the module that reads and writes safetensors, which `path` is to be."""
    try:
        import safetensors.torch  # noqa: PLC0415  # pardata does not require it
    except ImportError as error:
        msg = f"{path} needs safetensors, which are not installed: pip install safetensors"
        raise ImportError(msg) from error
    return safetensors.torch


def _first_sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0]
