"""Bare weights, for others: PyTorch's own files, and safetensors where they are installed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pardata.checkpoint._disk import save, sync
from pardata.model._state_dict import safetensors_for


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
            safetensors_for(path).save_file(own, unfinished)
        else:
            save(state, unfinished)
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


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
