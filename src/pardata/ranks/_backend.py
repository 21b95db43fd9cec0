"""The backends of process groups: what each takes, by name, and how a group ends without them."""

from typing import Any

import torch.distributed as dist


def runs_on_gpus(backend: str | None) -> bool:
    """Return whether a group with this backend reduces tensors on GPUs."""
    return backend is not None and "nccl" in backend


def takes_cpu_tensors(backend: str | None) -> bool:
    """Return whether a group with this backend reduces tensors on the CPU."""
    return backend != "nccl"


def backends() -> list[Any]:
    """Return the backends of all groups: held while the groups are destroyed, they end last.

    A gloo group waits at its end for its threads, and a thread that drops a tensor needs the
    interpreter, which torch keeps meanwhile up to 2.7: no end comes. A backend's own handle gives
    the interpreter up. https://github.com/pytorch/pytorch/pull/154976
    """
    groups = dist.distributed_c10d._world.pg_map  # noqa: SLF001  # torch has no public way
    return [group._get_backend(kind) for group in groups for kind in group._device_types]  # noqa: SLF001  # as above
