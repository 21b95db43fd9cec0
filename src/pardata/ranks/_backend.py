"""Which tensors a backend takes: the place that knows the backends by name."""


def runs_on_gpus(backend: str | None) -> bool:
    """Return whether a group with this backend reduces tensors on GPUs."""
    return backend is not None and "nccl" in backend


def takes_cpu_tensors(backend: str | None) -> bool:
    """Return whether a group with this backend reduces tensors on the CPU."""
    return backend != "nccl"
