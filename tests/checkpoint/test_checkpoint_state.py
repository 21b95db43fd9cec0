"""What is taken from things, as a tree that can be written, and given back."""

import copy
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import run
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pardata import wrap_model
from pardata.checkpoint import _state as states

leaves = st.none() | st.integers() | st.text(max_size=3) | st.builds(torch.ones, st.integers(0, 3))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)


def alike(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@given(trees)
def test_a_tree_stays_what_it_is_when_it_is_taken_copied_split_and_joined(tree):
    before = copy.deepcopy(tree)
    taken = states.state_of("x", tree)
    whole, sharded = states.split(states.copied(taken))
    assert (sharded, states.marks(whole)) == ({}, [])
    assert alike(states.joined(whole, {}), before)
    assert alike(tree, before)


def test_the_type_of_a_mapping_and_what_it_carries_stay():
    state = nn.BatchNorm1d(2).state_dict()
    taken = states.copied(states.state_of("x", state))
    assert type(taken) is OrderedDict
    assert taken._metadata == state._metadata
    assert states.state_of("x", MappingProxyType({"a": 1})) == {"a": 1}


def test_a_copy_shares_nothing_but_what_shared_before():
    shared, part = torch.zeros(3), torch.zeros(9)[3:5]
    tree = states.state_of("x", {"a": shared, "b": [shared], "c": part, "d": {1}})
    copies = states.copied(tree)
    assert copies["a"] is copies["b"][0]
    for tensor in (shared, part):
        tensor.add_(1)
    tree["d"].add(2)
    assert copies["a"].tolist() == [0, 0, 0]
    assert copies["c"].tolist() == [0, 0]
    assert copies["d"] == {1}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_a_copy_waits_for_each_gpu_that_it_copies_from(monkeypatch):
    # Of a machine that has none: tensors that say they are on GPUs, and a note of what is waited
    # for. tests/gpu/test_copies.py has real ones.
    waited_for = []

    class Stream:
        def __init__(self, device):
            self.synchronize = lambda: waited_for.append(str(device))

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with FakeTensorMode():
        on_gpus = [torch.empty(size, device=f"cuda:{size % 2}") for size in range(1, 5)]
        copies = states.copied({"a": on_gpus, "b": torch.ones(2)})
    assert {copy.device.type for copy in copies["a"]} == {"cpu"}
    assert sorted(waited_for) == ["cuda:0", "cuda:1"]


def test_no_memory_around_a_tensor_is_kept():
    taken = states.state_of("x", torch.zeros(1000)[5:7])
    assert taken.untyped_storage().nbytes() == 8
    column = torch.arange(12).reshape(3, 4)[:, 1]
    assert states.state_of("x", column).tolist() == [1, 5, 9]


def test_a_tensor_that_trains_is_saved_as_numbers():
    weight = nn.Parameter(torch.ones(2))
    taken = states.state_of("x", {"a": weight, "b": weight * 2})
    assert not taken["a"].requires_grad
    assert taken["b"].grad_fn is None


def test_leaves_are_told_by_their_paths_and_of_tensors_only_the_kind():
    tree = {"a": [1, {"b": torch.ones(2)}], 3: "x", "s": {"q", "p"}, "e": {}}
    assert states.leaves(tree) == {
        "a.0": "1",
        "a.1.b": "a Tensor",
        "3": "'x'",
        "s": "[\"'p'\", \"'q'\"]",
    }


def kinds(strategies):
    found = {}
    for strategy in strategies:
        model = wrap_model(nn.Sequential(nn.Linear(2, 2)), strategy, device="cpu")
        model = torch.compile(model) if strategy == "ddp" else model
        found[strategy] = states.strategy_of(model), list(states.state_of("x", model))
    return found, states.strategy_of(torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(("size", "also"), [(1, ["dp"]), (2, ["ddp"])])
def test_the_strategy_and_the_plain_names_of_a_model_are_told(size, also):
    for found, other in run(kinds, ["none", "exact", *also], world_size=size):
        assert other is None
        for strategy, told in found.items():
            assert told == (strategy, ["0.weight", "0.bias"])


class Own:
    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        self.state = state


def test_what_has_both_methods_is_a_thing_and_all_else_a_value():
    assert states.is_stateful(Own())
    assert not states.is_stateful({"state_dict": 1})
    thing = Own()
    states.load(thing, states.state_of("x", thing))
    assert thing.state == {"a": 1}


def test_what_cannot_be_loaded_safely_is_named_with_its_cause():
    with pytest.raises(TypeError, match=r"`x\['a'\]\[0\]` is <object object") as raised:
        states.state_of("x", {"a": [object()]})
    assert raised.value.__cause__ is not None
    long = dict.fromkeys(range(1000), object)
    with pytest.raises(TypeError) as raised:
        states.state_of("x", [long])
    assert len(str(raised.value)) < 400


def test_a_tree_that_holds_itself_is_an_error():
    tree = {}
    tree["a"] = tree
    with pytest.raises(RecursionError):
        states.state_of("x", tree)


def with_a_note(note):
    """Return a state dict as modules make them, which carries something beside its items."""
    state = OrderedDict(weight=torch.ones(1))
    state._metadata = note
    return state


UNLOADABLE = {
    "a key": lambda: {Path("a"): 1},
    "a key, deep": lambda: [{"a": ({Path("a"): 1},)}],
    "beside the items": lambda: with_a_note({"version": Path("a")}),
    "a number that no torch reads": lambda: {"a": 2**3000},
}


@pytest.mark.parametrize("name", UNLOADABLE)
def test_what_hides_in_a_plain_tree_is_refused_all_the_same(name):
    with pytest.raises(TypeError, match="what is saved must be tensors, numbers, strings"):
        states.state_of("x", UNLOADABLE[name]())


def test_what_a_state_dict_carries_beside_its_items_stays():
    taken = states.state_of("x", with_a_note({"version": 2, "far": 2**70}))
    assert taken._metadata == {"version": 2, "far": 2**70}
