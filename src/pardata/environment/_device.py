"""The accelerator: what torch sees of it here, and what it can do. No other file names one."""

import os
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# By which a launcher, or a user, restricts what a process sees: of CUDA, ROCm, XPU and NPU.
_MASKS = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES"),
)


def visible_devices() -> list[torch.device]:
    """Return the accelerators that torch sees: none on a machine with a CPU alone."""
    if not torch.accelerator.is_available():
        return []
    found: Any = torch.accelerator.current_accelerator()
    return [torch.device(found.type, n) for n in range(torch.accelerator.device_count())]


def current_device(n: int) -> torch.device:
    """Return the accelerator that is current, else number `n`: the first is also unchosen."""
    seen = visible_devices()
    of_kind = torch.get_device_module(seen[0])
    # Where none is in use, to ask which one is current would begin to use it.
    in_use = hasattr(of_kind, "is_initialized") and of_kind.is_initialized()
    return seen[(of_kind.current_device() if in_use else 0) or (n if n < len(seen) else 0)]


def has_streams(device: torch.device) -> bool:
    """Return whether work runs there on streams next to the host, copies of pinned memory too."""
    # On mps, which has streams from torch 2.15 on, a copy that nobody waits for reads what is gone:
    # pytorch/pytorch#139550.
    has_none = device.type in ("cpu", "mps")
    return not has_none and hasattr(getattr(torch, device.type, None), "Stream")


def properties_of(device: torch.device) -> Any:
    """Return what an accelerator says of itself: name, total_memory, perhaps uuid."""
    of_kind: Any = torch.get_device_module(device)
    if device.type == "mps":
        return SimpleNamespace(name="mps", total_memory=of_kind.recommended_max_memory())
    return of_kind.get_device_properties(device)


@cache
def widest_float_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 if a device has no float64."""
    has_it = properties_of(device).has_fp64 if device.type == "xpu" else device.type != "mps"
    return torch.float64 if has_it else torch.float32


def visibility_variables() -> dict[str, str]:
    """Return the variables of this process that restrict which devices it sees."""
    return {name: os.environ[name] for name in _MASKS if name in os.environ}


def undetected_gpus(root: Path = Path("/")) -> tuple[str, str] | None:
    """Return that torch sees none of the GPUs that are here, and the cure, if that is so."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # torch warns of a driver that is too old
        if visible_devices():
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
        f"install a torch for CUDA (this one is {torch.__version__}), unset "
        f"CUDA_VISIBLE_DEVICES (it is {mask!r}), start the container with --gpus=all, or see with "
        f"nvidia-smi whether the driver is new enough"
    )
    return text, cure


def checked_device(device: Any) -> torch.device:
    """Return the device that is meant, with its number: of "cuda" that of the current one.

    Raises:
        RuntimeError: if there is none such on this machine.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # they are torch's
        why = str(error).partition("\n")[0]
        raise RuntimeError(
            f"`device` must be one that this machine has, but is {str(device)!r}: {why}"
        ) from error
