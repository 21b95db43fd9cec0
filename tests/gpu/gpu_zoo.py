"""What several files of tests on GPUs use inside their ranks."""

import contextlib

import torch


@contextlib.contextmanager
def nothing_waits(device):
    """Raise where the host waits for the GPU."""
    if torch.device(device).type == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
