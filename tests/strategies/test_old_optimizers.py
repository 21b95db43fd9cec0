"""Optimizers of parameters that sharding has replaced."""

import pytest
from torch import nn, optim

from pardata.strategies._fsdp import refuse_old_optimizers


def test_every_step_of_an_old_optimizer_raises():
    replaced, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer, others = optim.SGD(replaced.parameters()), optim.SGD(other.parameters())
    refuse_old_optimizers([])
    optimizer.step()
    refuse_old_optimizers(replaced.parameters())
    others.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="2 of the 2 in SGD are those that wrap_model has"):
            optimizer.step()
