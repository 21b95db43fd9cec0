"""The accelerator, the backends that send from it, and CPU cores. No other file names one."""

import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

# ruff: noqa: SLF001  # process groups with public stores and options: pytorch/pytorch#151960

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


def without_wait(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on `device`; where that has streams, the host does not wait for the copy."""
    if tensor.is_cpu and has_streams(device):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


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
    # The driver's folder is there in a container that was started without them, too.
    found = len(list((root / "proc/driver/nvidia/gpus").glob("*")))
    if not found and not said:
        return None
    text = f"torch sees none of the driver's {found} GPUs{f' ({said[0].message})' if said else ''}"
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


def backend_for(device: torch.device) -> str:
    """Return the backend of ranks that compute on such devices: torch's own, and gloo."""
    native = dist.Backend.default_device_backend_map.get(device.type, "gloo")
    return f"{device.type}:{native},cpu:gloo" if has_accelerator_backend(native) else "gloo"


def check_supported(device: torch.device, backend: str | None) -> None:
    """Refuse a device from which ranks cannot send.

    Raises:
        RuntimeError: says what can be done there.
    """
    if not supports_device(backend, device.type):
        raise RuntimeError(
            f"`device` must be one from which ranks can send over {backend!r}, but is "
            f"{str(device)!r}: leave out `backend`, pass 'cpu', or train in one process under "
            f"strategy 'none'"
        )


def has_accelerator_backend(backend: str | None) -> bool:
    """Return whether a group with this backend has one that is for accelerators alone."""
    return backend is not None and not all("cpu" in kinds for _, kinds in _parts(backend))


def supports_device(backend: str | None, kind: str) -> bool:
    """Return whether a group with this backend, if it is one, reduces tensors on such devices."""
    parts = _parts(backend or "gloo")
    return any(kind in kinds if own is None else kind == own for own, kinds in parts)


def _parts(backend: str) -> Iterator[tuple[str | None, Collection[str]]]:
    """Yield for which kind of devices each part of a backend is, if that is said, and could be."""
    for part in backend.split(","):
        kind, _, name = part.rpartition(":")
        # One that torch does not know yet, as its package is not imported, may be for any.
        yield kind or None, dist.Backend.backend_capability.get(name, ("cpu", kind))


def has_cpu_backend_beside(backend: str | None, device: torch.device) -> bool:
    """Return whether a group with this backend sends numbers on the CPU next to its gradients.

    The gradients are of a model on `device`, whose own backend sends them; gloo sends the numbers.
    """
    return (
        device.type != "cpu"
        and has_accelerator_backend(backend)
        and supports_device(backend, "cpu")
    )


def new_gloo_group(timeout: timedelta | None = None) -> Any:
    """Make a gloo group in addition to the default one, for what is on the CPU. Collective.

    Numbers must not meet gradients on one connection. gloo ends a process that is sent more than it
    expects: that happens if a rank reduces a number and the others are in `backward`.
    """
    # Where the default group is bound to a device, torch asks each group for its backend there.
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    backend = "gloo" if bound is None else f"cpu:gloo,{bound.type}:gloo"
    return dist.new_group(backend=backend, timeout=timeout)


def all_groups() -> list[Any]:
    """Return every process group that this process is in."""
    return list(distributed_c10d._world.pg_map)


def default_store() -> Any:
    """Return the store of the default group, which may be somebody else's."""
    return distributed_c10d._get_default_store()


def broadcast_together(tensors: list[Tensor], group: Any = None) -> None:
    """Set tensors to rank 0's, in messages of 250 MB: more would take as much memory again."""
    taken: Any = group or dist.group.WORLD
    dist._broadcast_coalesced(taken, tensors, 250 * 2**20, 0)


def sequence_number(group: Any) -> int:
    """Return how many collectives this rank has started in `group`; 0 if its backend says nothing.

    Args:
        group: a process group; None for the default one.
    """
    asked: Any = group or dist.group.WORLD
    try:
        number: int = asked._get_sequence_number_for_group()
    except RuntimeError:
        return 0
    return number


def cpus_of_process() -> list[int]:
    """Return the numbers of the cores to which this process is bound, by default of all."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cgroup_cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the cores that this container may use, if it is limited (cgroup version 2 or 1)."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with suppress(OSError):
            limit, period = " ".join((root / file).read_text() for file in files).split()
            return None if limit in ("max", "-1") else int(limit) / int(period)
    return None
