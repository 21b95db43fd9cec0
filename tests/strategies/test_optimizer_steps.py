"""Who looks at optimizers before they step, and that it ends with the module."""

import gc

from torch import nn, optim

from pardata.strategies._optimizer_steps import before_steps


def test_each_optimizer_that_steps_is_looked_at_until_the_module_is_gone():
    module, other, seen = nn.Linear(1, 1), nn.Linear(1, 1), []
    before_steps(module, seen.append)
    optimizer = optim.SGD(other.parameters())
    optimizer.step()
    optimizer.step()
    assert seen == [optimizer, optimizer]
    del module
    gc.collect()
    optimizer.step()
    assert len(seen) == 2


def test_a_module_may_be_collected_while_an_optimizer_is_looked_at():
    kept, trained, seen = nn.Linear(1, 1), nn.Linear(1, 1), []
    short_lived = [nn.Linear(1, 1), nn.Linear(1, 1)]
    before_steps(short_lived[0], seen.append)
    before_steps(kept, lambda _: (short_lived.clear(), gc.collect()))
    before_steps(short_lived[1], seen.append)
    optimizer = optim.SGD(trained.parameters())
    optimizer.step()
    optimizer.step()
    assert 1 <= len(seen) <= 2
