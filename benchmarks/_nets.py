"""The nets that several benchmarks train, and how."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Block = Callable[[Iterable[Any]], object]

# Titles, and layers that are so small that a step is mostly overhead.
SMALL_NETS: dict[str, tuple[str, Callable[[], list[nn.Module]]]] = {
    "mlp": ("MLP 64-64-10", lambda: [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]),
    "batch-norm": (
        "MLP 64-64-10 with batch norm",
        lambda: [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)],
    ),
}


def conv_net() -> nn.Module:
    """Return the net of examples/articles/mnist.py."""
    convolutions = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()
    head = nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), *head)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a batch."""
    x, y = batch
    return cross_entropy(model(x), y)


def trained_by(model: nn.Module, backward: Callable[[nn.Module, Any], object]) -> Block:
    """Return a loop that trains with SGD, whose gradients `backward` makes of each batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def block(batches: Iterable[Any]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()

    return block
