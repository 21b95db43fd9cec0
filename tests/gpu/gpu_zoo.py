"""What several files of tests on GPUs use inside their ranks."""

import contextlib

import torch

SPIN = 100_000_000  # cycles: some 50 ms, against some 0.1 ms for all else that a step does


@contextlib.contextmanager
def nothing_waits(device):
    """Raise where the host waits for the GPU."""
    if torch.device(device).type == "cpu":
        yield
        return
    own = torch.get_device_module(device)
    own.set_sync_debug_mode("error")
    try:
        yield
    finally:
        own.set_sync_debug_mode("default")


def late(place, value):
    """Return a copy of `value` that is finished late on the stream of now of `place`.

    It is NaN until then.
    """
    place = torch.device(place)
    if place.type == "cpu":
        return value.clone()
    own = torch.get_device_module(place)
    with own.device(place):
        result = torch.full(value.shape, float("nan"), dtype=value.dtype, device=place)
        own._sleep(SPIN)
        return result.copy_(value, non_blocking=True)
