"""The backends of process groups: what each takes, by name, and how a group ends without them."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def runs_on_gpus(backend: str | None) -> bool:
    """Return whether a group with this backend reduces tensors on GPUs."""
    return backend is not None and "nccl" in backend


def takes_cpu_tensors(backend: str | None) -> bool:
    """Return whether a group with this backend reduces tensors on the CPU."""
    return backend != "nccl"


def sends_numbers_apart(backend: str | None, device: torch.device) -> bool:
    """Return whether a group with this backend sends numbers on the CPU beside its gradients.

    The gradients are of a model on `device`: NCCL sends them then, and gloo the numbers.
    """
    return device.type == "cuda" and runs_on_gpus(backend) and takes_cpu_tensors(backend)


def timeout_of(group: Any) -> timedelta | None:
    """Return how long a collective on the CPU may take in `group`, if its backend says that."""
    own = [kind for kind in group._device_types if kind.type == "cpu"]  # noqa: SLF001  # torch has no public way
    # What torch puts around a backend to debug it says nothing.
    options = getattr(group._get_backend(own[0]), "options", None) if own else None  # noqa: SLF001  # as above
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


def backends() -> list[Any]:
    """Return the backends of all groups: held while the groups are destroyed, they end last.

    A gloo group waits at its end for its threads, and a thread that drops a tensor needs the
    interpreter, which torch keeps meanwhile up to 2.7: no end comes. A backend's own handle gives
    the interpreter up. https://github.com/pytorch/pytorch/pull/154976
    """
    groups = dist.distributed_c10d._world.pg_map  # noqa: SLF001  # torch has no public way
    return [group._get_backend(kind) for group in groups for kind in group._device_types]  # noqa: SLF001  # as above
