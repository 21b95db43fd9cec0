"""What the tests of gradients share: a model, batches, and by how much a gradient is off."""

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from sharding import whole
from torch import nn

from pardata import Microbatches, unwrap, world
from pardata.data._plan import local_range

CLOSE = 1e-12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, rows):
        return self.last(torch.tanh(self.first(rows)))


def network(kind=Net):
    torch.manual_seed(0)
    return kind().double()


def rows_of(number, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    options = {"generator": numbers, "dtype": torch.float64}
    return torch.randn(number, 4, **options), torch.randn(number, 3, **options)


def pieces(sizes, seed=0):
    inputs, targets = rows_of(sum(sizes), seed)
    return list(zip(inputs.split(sizes), targets.split(sizes), strict=True))


def cut(parts):
    """Return this rank's share of a step of microbatches."""
    here = world()
    own = local_range(len(parts), here.rank, here.size)
    facts = {"epoch": 0, "step": 0, "first": own.start, "counts": [len(x) for x, *_ in parts]}
    return Microbatches([parts[n] for n in own], size=here.size, placeholder=parts[0], **facts)


def squared_error(model, batch):
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets)


def gradients(model):
    return [
        None if p.grad is None else whole(p.grad).detach().clone()
        for p in unwrap(model).parameters()
    ]


def off(found, wanted):
    """Return the largest relative error of a list of gradients."""
    worst = 0.0
    for ours, true in zip(found, wanted, strict=True):
        if ours is None or true is None:
            assert ours is true, "one is None and the other is not"
        elif true.norm() == 0:
            worst = max(worst, ours.norm().item())
        else:
            error = ((ours - true).norm() / true.norm()).item()
            worst = max(worst, error if error == error else torch.inf)  # noqa: PLR0124  # NaN
    return worst


def truth_of(inputs, targets):
    """Return loss and gradients of one backward over the whole global batch."""
    net = network()
    loss = squared_error(net, (inputs, targets))
    loss.backward()
    return loss.item(), gradients(net)
