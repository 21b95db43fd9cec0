"""The accelerator, the backends that send from it, and CPU cores. No other file names one."""

import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# ruff: noqa: SLF001  # can go with public stores of groups: pytorch/pytorch#151960

# The variables of CUDA, ROCm, XPU and NPU that restrict the visible devices.
_VISIBILITY_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES"),
)


def visible_devices() -> list[torch.device]:
    """Return the accelerators that torch sees, an empty list on a machine without one."""
    if not torch.accelerator.is_available():
        return []
    found: Any = torch.accelerator.current_accelerator()
    return [torch.device(found.type, n) for n in range(torch.accelerator.device_count())]


@cache
def device_kinds() -> tuple[str, ...]:
    """Return the types of the devices that torch sees: of the CPU and of its accelerators."""
    return ("cpu", *{device.type for device in visible_devices()})


def current_device(n: int) -> torch.device:
    """Return the current accelerator, or number `n` if the first one is current by default."""
    seen = visible_devices()
    of_kind = torch.get_device_module(seen[0])
    # `current_device` would initialize an accelerator that is not in use.
    in_use = hasattr(of_kind, "is_initialized") and of_kind.is_initialized()
    return seen[(of_kind.current_device() if in_use else 0) or (n if n < len(seen) else 0)]


def has_streams(device: torch.device) -> bool:
    """Return whether a device runs work, and copies of pinned memory, asynchronously on streams."""
    # On mps, which has streams from torch 2.15 on, an asynchronous copy reads freed memory:
    # pytorch/pytorch#139550.
    has_none = device.type in ("cpu", "mps")
    return not has_none and hasattr(getattr(torch, device.type, None), "Stream")


def without_wait(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on `device`; where that has streams, the host does not wait for the copy."""
    if tensor.is_cpu and has_streams(device):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def properties_of(device: torch.device) -> Any:
    """Return the properties of an accelerator: name, total_memory, perhaps uuid."""
    of_kind: Any = torch.get_device_module(device)
    if device.type == "mps":
        return SimpleNamespace(name="mps", total_memory=of_kind.recommended_max_memory())
    return of_kind.get_device_properties(device)


# Attributes and functions of torch that show how CUDA and ROCm choose kernels.
_KERNEL_SETTINGS = (
    *("version.cuda", "version.hip", "backends.cudnn.version", "backends.cudnn.enabled"),
    *(f"backends.cudnn.{kind}.fp32_precision" for kind in ("conv", "rnn")),
    *(f"backends.cuda.matmul.{name}" for name in ("fp32_precision", "allow_fp16_accumulation")),
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    *(f"backends.cuda.{kind}_sdp_enabled" for kind in ("flash", "mem_efficient", "cudnn", "math")),
    "backends.cuda.preferred_blas_library",
)


def kernel_settings(device: torch.device) -> dict[str, str]:
    """Return versions and settings that choose kernels of CUDA and ROCm; nothing on other devices.

    The version of the driver has no public name.
    """
    names = _KERNEL_SETTINGS if device.type == "cuda" else ()
    found = {f"torch.{name}": attrgetter(name)(torch) for name in names}
    # An unset precision is IEEE's, like one that is set to the default.
    return {n: str(x() if callable(x) else x).replace("none", "ieee") for n, x in found.items()}


@cache
def widest_float_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 if a device has no float64."""
    has_it = properties_of(device).has_fp64 if device.type == "xpu" else device.type != "mps"
    return torch.float64 if has_it else torch.float32


def visibility_variables() -> dict[str, str]:
    """Return the variables of this process that restrict which devices it sees."""
    return {name: os.environ[name] for name in _VISIBILITY_VARIABLES if name in os.environ}


def undetected_gpus(root: Path = Path("/")) -> tuple[str, str] | None:
    """Return a text and its cure if torch sees none of the GPUs of this machine, else None."""
    with warnings.catch_warnings(record=True, action="always") as seen:
        # torch warns of a driver that is too old.
        if visible_devices():
            return None
    # The driver's folder exists also in a container that was started without GPUs.
    found = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    if not found and not seen:
        return None
    text = f"torch sees none of the driver's {found} GPUs{f' ({seen[0].message})' if seen else ''}"
    mask = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    cure = f"install a torch for CUDA (this is {torch.__version__}), unset CUDA_VISIBLE_DEVICES "
    cure += f"({mask!r}), start the container with --gpus=all, or check the driver with nvidia-smi"
    return text, cure


def checked_device(device: Any) -> torch.device:
    """Return `device` with its index; without an index it is the current one.

    Raises:
        RuntimeError: this machine has no such device.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # raised by torch
        why = str(error).partition("\n")[0]
        msg = f"`device` must be one that this machine has, but is {str(device)!r}: {why}"
        raise RuntimeError(msg) from error


def backend_for(device: torch.device) -> str:
    """Return the default backend of ranks on such devices: torch's for the device, and gloo."""
    native = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    return f"{device.type}:{native},cpu:gloo" if has_accelerator_backend(native) else "gloo"


def check_supported(device: torch.device, backend: str | None) -> None:
    """Raise if the backend cannot send from this device.

    Raises:
        RuntimeError: the backend does not support the device.
    """
    if not supports_device(backend, device.type):
        raise RuntimeError(
            f"`device` must be one from which ranks can send over {backend!r}, but is "
            f"{str(device)!r}: leave out `backend`, pass 'cpu', or train in one process with 'none'"
        )


def has_accelerator_backend(backend: str | None) -> bool:
    """Return whether a part of this backend does not support the CPU."""
    return backend is not None and not all("cpu" in kinds for _, kinds in _parts(backend))


def supports_device(backend: str | None, kind: str) -> bool:
    """Return whether a group with this backend reduces tensors on devices of this type."""
    parts = _parts(backend or "gloo")
    return any(kind in kinds if only is None else kind == only for only, kinds in parts)


def _parts(backend: str) -> Iterator[tuple[str | None, Collection[str]]]:
    """Yield the device type of each part of a backend, if it names one, and the supported types."""
    for part in backend.split(","):
        kind, _, name = part.rpartition(":")
        # A third-party backend that is not registered yet is assumed to support the CPU and its
        # device.
        yield kind or None, dist.Backend.backend_capability.get(name, ("cpu", kind))


def has_cpu_backend_beside(backend: str | None, device: torch.device) -> bool:
    """Return whether the group has gloo for the CPU, separate from the backend of the gradients.

    The model is on `device`, whose backend reduces its gradients.
    """
    is_separate = device.type != "cpu" and has_accelerator_backend(backend)
    return is_separate and supports_device(backend, "cpu")


def new_gloo_group(timeout: timedelta | None = None) -> Any:
    """Create a gloo group in addition to the default one, for tensors on the CPU. Collective.

    Small numbers and gradients need different connections. gloo ends a process that receives more
    than it expects: if one rank reduces a number and the others are in `backward`.
    """
    # If the default group is bound to a device, torch asks each group for its backend of that
    # device.
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    backend = "gloo" if bound is None else f"cpu:gloo,{bound.type}:gloo"
    return dist.new_group(backend=backend, timeout=timeout)


def all_groups() -> list[Any]:
    """Return every process group that this process is in."""
    return list(dist.distributed_c10d._world.pg_map)


def default_store() -> Any:
    """Return the store of the default group, whoever created the group."""
    return dist.distributed_c10d._get_default_store()


def broadcast_together(tensors: list[Tensor], group: Any = None) -> None:
    """Broadcast rank 0's tensors, in messages of 250 MB, which bounds the extra memory."""
    target: Any = group or dist.group.WORLD
    dist._broadcast_coalesced(target, tensors, 250 * 2**20, 0)


def sequence_number(group: Any) -> int:
    """Return the number of collectives that this rank has started in `group`, 0 if unknown.

    Args:
        group: a process group; None for the default one.
    """
    asked: Any = group or dist.group.WORLD
    with suppress(RuntimeError):
        return int(asked._get_sequence_number_for_group())
    return 0


def in_backward() -> bool:
    """Return whether a backward runs now, in which checkpointed modules run their forward again."""
    return torch._C._current_graph_task_id() >= 0


def cpus_of_process() -> list[int]:
    """Return the numbers of the cores to which this process is bound, by default of all."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cgroup_cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the CPU quota of this container (cgroup version 2 or 1), None if it has no limit."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with suppress(OSError):
            limit, period = " ".join((root / file).read_text() for file in files).split()
            return None if limit in ("max", "-1") else int(limit) / int(period)
    return None
