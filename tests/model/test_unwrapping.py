"""`unwrap` finds the module inside any nesting of wrappers."""

import itertools

import pytest
import torch
from on_ranks import run
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pardata import unwrap, wrap_model
from pardata.model._unwrap import ShardedModule, is_parallel

FSDP_ON_CPU = hasattr(torch.cpu.Stream, "record_event")


def compiled(model):
    return torch.compile(model, backend="eager")


def test_a_bare_module_comes_back_as_it_is():
    net = nn.Linear(2, 2)
    assert unwrap(net) is net
    assert not is_parallel(net)


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


def nested(order):
    net = model = nn.Linear(2, 2)
    for layer in order:
        model = {"compile": compiled, "ddp": DistributedDataParallel, "ours": ours}[layer](model)
    same = unwrap(model) is net
    model(torch.ones(3, 2)).sum().backward()
    return same, unwrap(nn.Sequential(model)) is not net, is_parallel(nn.Sequential(model))


def ours(model):
    return wrap_model(model, "ddp")


@pytest.mark.parametrize(
    "order", [("ddp",), ("ours",), ("compile", "ours"), ("ours", "compile"), ("compile", "ddp")]
)
def test_ddp_is_peeled_inside_and_outside_of_compile(order):
    assert run(nested, order, world_size=2) == [(True, True, True)] * 2


def sharded(compile_first):
    net = nn.Linear(2, 2)
    model = wrap_model(compiled(net) if compile_first else net, "fsdp")
    model(torch.ones(3, 2)).sum().backward()
    return (
        unwrap(model) is net,
        isinstance(net, ShardedModule),
        is_parallel(model),
        list(net.state_dict()),
    )


@pytest.mark.skipif(not FSDP_ON_CPU, reason="fully_shard of this torch needs a GPU")
@pytest.mark.parametrize("compile_first", [False, True])
def test_a_sharded_module_is_its_own_inside(compile_first):
    expected = (True, True, True, ["weight", "bias"])
    assert run(sharded, compile_first, world_size=2) == [expected] * 2
