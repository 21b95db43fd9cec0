"""What several files of tests on GPUs use inside their ranks."""

import contextlib

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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


class NoFloat64(TorchDispatchMode):
    """Raise, as MPS does, where something would be float64 on an accelerator."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_cpu:
                assert tensor.dtype != torch.float64, operation
        return made


def widest_without_float64(device):
    return torch.float64 if device.type == "cpu" else torch.float32


class Spread(nn.Module):
    """A layer on each device."""

    def __init__(self, places):
        super().__init__()
        self.places = places
        self.first, self.last = nn.Linear(4, 64).to(places[0]), nn.Linear(64, 3).to(places[1])

    def forward(self, rows):
        return self.last(torch.tanh(self.first(rows.to(self.places[0]))).to(self.places[1]))


class Smooth(nn.Module):
    """A small model, of which one may ask for its loss, too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, rows, targets=None, kind="scores"):
        scores = self.last(torch.tanh(self.first(rows)))
        if kind == "scores":
            return scores
        return F.cross_entropy(scores, targets), scores


def seeded(kind, *args):
    torch.manual_seed(0)
    return kind(*args)
