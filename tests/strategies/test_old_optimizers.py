"""How long optimizers are looked at for parameters that sharding has replaced."""

import gc
from weakref import ref

import pytest
from torch import nn, optim

from pardata.strategies._old_optimizers import refuse_old_optimizers


def test_each_step_of_an_old_optimizer_is_refused_until_the_module_is_gone():
    module, replaced, other = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    refuse_old_optimizers(module, [ref(parameter) for parameter in replaced.parameters()])
    optim.SGD(other.parameters()).step()
    optimizer = optim.SGD(replaced.parameters())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="2 of the 2 in SGD are those that wrap_model has"):
            optimizer.step()
    del module
    gc.collect()
    optimizer.step()


def test_a_module_may_be_collected_while_an_optimizer_is_looked_at():
    kept, trained, looks = nn.Linear(1, 1), nn.Linear(1, 1), []
    short_lived = [nn.Linear(1, 1), nn.Linear(1, 1)]

    def collecting():  # in place of a reference to a parameter, which is asked at each look
        looks.append(len(short_lived))
        if len(looks) > 1:
            short_lived.clear()
            gc.collect()

    refuse_old_optimizers(short_lived[0], [])
    refuse_old_optimizers(kept, [collecting])
    refuse_old_optimizers(short_lived[1], [])
    for _ in range(2):
        optim.SGD(trained.parameters()).step()
    assert looks == [2, 2, 0]
