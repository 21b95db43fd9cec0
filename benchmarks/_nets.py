"""The net that several benchmarks train."""

from torch import nn


def conv_net() -> nn.Module:
    """Return the net of examples/articles/mnist.py."""
    convolutions = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()
    head = nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), *head)
