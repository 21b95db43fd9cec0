"""`unwrap` finds the module inside any nesting of wrappers."""

import itertools

import pytest
import torch
from on_ranks import run
from torch import nn
from torch.nn.parallel import DataParallel

from pardata import unwrap, wrap_model


def compiled(model):
    return torch.compile(model, backend="eager")


def test_a_module_with_children_named_like_wrappers_is_not_peeled():
    net = nn.Module()
    net.module = nn.Linear(1, 1)
    net._orig_mod = nn.Linear(1, 1)
    assert unwrap(net) is net


# torch.compile of what is compiled already is, to PyTorch itself, no module any more.
NESTINGS = [
    layers
    for layers in itertools.product([DataParallel, compiled], repeat=3)
    if (compiled, compiled) not in itertools.pairwise(layers)
]


@pytest.mark.parametrize("layers", NESTINGS)
def test_any_nesting_of_compile_and_data_parallel_is_peeled(layers):
    net = model = nn.Linear(2, 2)
    for layer in layers:
        model = layer(model)
    assert unwrap(model) is net


def test_a_sharded_module_is_its_own_inside():
    run(sharded, world_size=2)


def sharded():
    for make in (lambda net: net, compiled):
        net = nn.Linear(2, 2)
        model = wrap_model(make(net), "fsdp")
        model(torch.ones(3, 2)).sum().backward()
        assert unwrap(model) is net
