"""The backends of process groups: what each takes, by name, and how a group ends without them."""

from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

# ruff: noqa: SLF001  # process groups with public stores and options: pytorch/pytorch#151960


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
