"""What the pages say of batch norm: when its results depend on the number of processes."""

import pytest
import torch
from on_ranks import run
from torch import nn
from torch.utils.data import TensorDataset

from pardata import backward, make_loader, seed_everything, unwrap, wrap_model


def trained(strategy, microbatch_size):
    """Return the losses of some steps in float64, and the running means and variances."""
    seed_everything(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    model = wrap_model(net, strategy)
    x, y = torch.randn(96, 6).double(), torch.randint(3, (96,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    data = TensorDataset(x, y)
    for batch in make_loader(data, 24, microbatch_size=microbatch_size, shuffle=True):
        optimizer.zero_grad()
        losses.append(backward(model, mean_loss, batch))
        optimizer.step()
    norm = unwrap(model)[1]
    return torch.stack(losses), torch.cat([norm.running_mean, norm.running_var])


def mean_loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def same(one, other):
    # Adam makes much of the gradient of a bias before a batch norm, which is rounding alone.
    return torch.allclose(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("strategy", "microbatch_size", "same_losses", "same_statistics"),
    [
        ("ddp", None, False, False),
        ("ddp", 4, True, False),
        ("fsdp", 4, True, False),
        ("exact", 4, True, True),
    ],
)
def test_batch_norm_is_equal_at_all_sizes_as_documented(
    strategy, microbatch_size, same_losses, same_statistics
):
    # With SyncBatchNorm: tests/gpu/test_model_gpu.py.
    alone = "exact" if strategy == "exact" else "none"
    ((losses, statistics),) = run(trained, alone, microbatch_size, world_size=1)
    for size in (2, 3):
        for found in run(trained, strategy, microbatch_size, world_size=size):
            agree = same(found[0], losses), same(found[1], statistics)
            assert agree == (same_losses, same_statistics)
