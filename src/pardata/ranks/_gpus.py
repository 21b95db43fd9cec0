"""The GPUs of this machine: those that torch sees, and those that it should see."""

import os
import warnings
from pathlib import Path

import torch


def visible_gpus() -> int:
    """Return how many GPUs torch sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def hidden_gpus(root: Path = Path("/")) -> tuple[str, str] | None:
    """Return that torch sees none of the GPUs that are here, and the cure, where that is so."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # torch warns of a driver that is too old
        if visible_gpus():
            return None
    # A container that was started without them has no device files, but the driver's folder.
    folders = {"dev": "nvidia[0-9]*", "proc/driver/nvidia/gpus": "*"}
    found = {f"/{name}": len(list((root / name).glob(one))) for name, one in folders.items()}
    where = max(found, key=lambda name: found[name])
    if not found[where] and not said:
        return None
    text = f"torch sees none of {found[where]} in {where}{f' ({said[0].message})' if said else ''}"
    mask = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    cure = (
        f"install a torch for CUDA (this one is for {torch.version.cuda or 'the CPU only'}), unset "
        f"CUDA_VISIBLE_DEVICES (it is {mask!r}), start the container with --gpus=all, or see with "
        f"nvidia-smi whether the driver is new enough"
    )
    return text, cure
