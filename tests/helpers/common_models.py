"""What the tests of models share: models, batches, and what ranks have of them."""

import torch
import torch.distributed as dist
from torch import nn

from pardata import wrap_model


class Net(nn.Module):
    """Batch norm in the middle, as most image models; a child called as PyTorch's wrappers do."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, rows):
        return self.last(torch.relu(self.norm(self.module(rows))))


def smooth():
    """Return a model without batch norm: its gradients are the means of its samples' ones."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def seeded(kind=Net, seed=0):
    torch.manual_seed(seed)
    return kind()


def batch(rows=12, seed=0):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


def own(tensor):
    """Return this rank's share."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def wrapped_as(strategy, model, **options):
    """Wrap under a strategy, or with ``torch.compile`` outside or inside."""
    if strategy == "compiled":
        return torch.compile(wrap_model(model), backend="eager")
    if strategy == "compiled inside ddp":
        return wrap_model(torch.compile(model, backend="eager"), "ddp")
    if strategy == "dp":
        options = {"device": "cpu", "device_ids": [], **options}
    return wrap_model(model, strategy, **options)
