"""Tensors that no call can carry are refused at the call, by path, on every rank."""

import tempfile

import pytest
import torch
from on_ranks import run_caught
from torch import nn

from pardata import (
    Checkpointer,
    all_gather,
    all_reduce_mean,
    all_reduce_sum,
    broadcast,
    check_in_sync,
    fingerprint,
    rank_zero_call,
    world,
    wrap_model,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # sparse CSR and nested tensors are a prototype


def quantized(scale=0.1):
    return torch.quantize_per_tensor(torch.ones(2, 2), scale, 0, torch.quint8)


KINDS = {
    "torch.quint8": quantized,
    "on meta": lambda: torch.ones(2, 2, device="meta"),
    "torch.sparse_csr": lambda: torch.eye(2).to_sparse_csr(),
    "torch.sparse_csc": lambda: torch.eye(2).to_sparse_csc(),
    "torch.sparse_bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
}


def module_with(value):
    net = nn.Linear(2, 1)
    net.register_buffer("table", value)
    return net


def saved(**things):
    with tempfile.TemporaryDirectory() as directory:
        Checkpointer(rank_zero_call(str, directory)).save(1, **things)


def saved_state(value):
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.1)
    optimizer.state[net.weight]["table"] = value
    saved(optimizer=optimizer)


CALLS = {
    "value['a'][0]": [
        lambda value: all_gather({"a": [value]}),
        lambda value: all_reduce_mean({"a": [value]}),
        lambda value: all_reduce_sum({"a": (value,)}),
    ],
    "state_dict()['table']": [lambda value: check_in_sync(module_with(value))],
    "graph['a'][0]": [lambda value: saved(graph={"a": [value]})],
    "model['table']": [lambda value: saved(model=module_with(value))],
    "optimizer['state'][0]['table']": [saved_state],
}
OF_RANK_0 = [
    lambda value: broadcast({"a": [value]}),
    lambda value: rank_zero_call(lambda: {"a": [value]}),
]


def of_ranks(path, number, kind, rank):
    """Make a call with such a tensor on one rank, or on all if there is no `rank`."""
    value = KINDS[kind]() if rank in (None, world().rank) else torch.ones(2, 2)
    (CALLS[path] if path else OF_RANK_0)[number](value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [None, 1])
def test_a_tensor_that_no_call_carries_raises_at_once_on_every_rank(kind, rank):
    for path, calls in CALLS.items():
        for number in range(len(calls)):
            for found in run_caught(of_ranks, path, number, kind, rank, world_size=2, timeout=30):
                assert f"`{path}` must be a dense or sparse COO tensor with memory, " in found.text
                assert f"but is {kind}: convert it first" in found.text


@pytest.mark.parametrize("kind", KINDS)
def test_what_rank_0_cannot_send_raises_on_every_rank(kind):
    for number in range(len(OF_RANK_0)):
        for found in run_caught(of_ranks, None, number, kind, 0, world_size=3, timeout=30):
            assert "`value['a'][0]` must be a dense or sparse COO tensor with memory" in found.text


@pytest.mark.parametrize("kind", KINDS)
def test_digests_and_saves_refuse_such_a_tensor_in_a_single_process(kind, tmp_path):
    net = module_with(KINDS[kind]())
    for call in (fingerprint, lambda net: Checkpointer(tmp_path).save(1, model=net)):
        with pytest.raises(TypeError, match=f"but is {kind}: convert it first"):
            call(net)
    assert not list(tmp_path.glob("*step*"))


def test_sparse_coo_tensors_are_hashed_saved_and_restored(tmp_path):
    net, checkpointer = module_with(torch.eye(3).to_sparse()), Checkpointer(tmp_path)
    assert fingerprint(net) != fingerprint(module_with(2 * torch.eye(3).to_sparse()))
    checkpointer.save(1, graph={"a": torch.eye(3).to_sparse()})
    assert torch.equal(checkpointer.restore().values["graph"]["a"].to_dense(), torch.eye(3))


def wrapped(kind, strategy):
    wrap_model(module_with(KINDS[kind]()), strategy)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "exact"])
@pytest.mark.parametrize("kind", ["torch.quint8", "torch.sparse_csr", "nested"])
def test_a_model_with_such_a_buffer_is_not_wrapped(kind, strategy):
    for found in run_caught(wrapped, kind, strategy, world_size=2, timeout=30):
        assert "`table` must be a dense or sparse COO tensor with memory" in found.text


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return self.layer(x * self.scale)


def scaled(on_meta):
    with torch.device("meta" if world().rank == on_meta else "cpu"):
        net = Scaled()
    if on_meta == 0:
        net.layer = nn.Linear(2, 1)
    model = wrap_model(nn.Sequential(net), "fsdp")
    return model(torch.ones(1, 2)).shape[0]


def test_a_buffer_of_rank_0_on_meta_is_refused_under_fsdp():
    assert run_caught(scaled, 1, world_size=2) == [1, 1]
    for found in run_caught(scaled, 0, world_size=2):
        assert "without torch.device('meta'), but `0.scale` is empty" in found.text
