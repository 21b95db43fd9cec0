"""Which device the tensors of a collective take: the place that knows the backends by name."""

import torch

_CPU = torch.device("cpu")


def runs_on_gpus(backend: str | None) -> bool:
    """Return whether a group with this backend reduces tensors on GPUs."""
    return backend is not None and "nccl" in backend


def takes_cpu_tensors(backend: str | None) -> bool:
    """Return whether a group with this backend reduces tensors on the CPU."""
    return backend is None or backend != "nccl"


def device_of_sums(backend: str | None, device: torch.device) -> torch.device:
    """Return where values are reduced: on the GPU that holds them, where the group has one."""
    return device if runs_on_gpus(backend) else _CPU
