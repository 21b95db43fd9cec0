"""Weights in and out whatever the wrapper, fingerprints, and ranks that no longer agree.

What is refused, and in which words: `tests/promises/misuse_models.py`.
"""

import hashlib
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from common_models import Net, wrapped_as
from on_ranks import caught, run, run_caught
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pardata import Checkpointer, check_in_sync, fingerprint, load_weights, unwrap, wrap_model

PREFIXES = ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]
WAYS = ("mapping", "path", "method")
NO_ASSIGN = "`assign` must be False for a wrapped model: assign to the module before wrapping it"


def seeded(seed):
    torch.manual_seed(seed)
    net = Net()
    net.norm.running_mean.normal_()
    return net


# load_weights


def load_all(strategies, directory):
    """Load every spelling and say which left the model different from what was meant."""
    failed = []
    path = f"{directory}/weights-{dist.get_rank() if dist.is_initialized() else 0}.pt"
    for number, prefix in enumerate(PREFIXES):
        source = seeded(number + 1)
        state = {prefix + name: value for name, value in source.state_dict().items()}
        before = list(state)
        torch.save(state, path)
        for strategy in strategies:
            for way in WAYS if prefix in ("", "module.") else WAYS[:1]:
                model = wrapped_as(strategy, seeded(0))
                if way == "method" and hasattr(type(model), "scatter"):
                    told = model.load_state_dict(state)
                else:
                    told = load_weights(model, path if way == "path" else state)
                good = fingerprint(model) == fingerprint(source) and told == ([], [])
                if not good or list(state) != before:
                    failed.append((strategy, prefix, way))
    return failed


def test_every_spelling_of_the_names_loads_in_a_single_process(tmp_path):
    assert load_all(["none", "dp", "compiled"], tmp_path) == []


@pytest.mark.parametrize("size", [1, 2])
def test_every_spelling_of_the_names_loads_on_several_ranks(size, tmp_path):
    strategies = ["ddp", "fsdp", "none", *["compiled inside ddp"] * (size == 2)]
    assert run(load_all, strategies, tmp_path, world_size=size) == [[]] * size


def test_weights_load_into_and_from_a_compiled_submodule():
    source, net, plain = seeded(1), seeded(0), seeded(0)
    net.last = torch.compile(net.last, backend="eager")
    assert "last._orig_mod.weight" in net.state_dict()
    load_weights(net, source.state_dict())
    assert torch.equal(net.last.weight, source.last.weight)
    load_weights(plain, {f"module.{name}": value for name, value in net.state_dict().items()})
    assert fingerprint(plain) == fingerprint(source)


def spoiled_loads(strategy):
    state = seeded(1).state_dict()
    less = {name: value for name, value in state.items() if name != "last.bias"}
    more = {**state, "module.stranger": torch.ones(1)}
    wide = {**state, "last.weight": torch.ones(3, 9)}
    strict = [
        caught(load_weights, wrapped_as(strategy, seeded(0)), s).text for s in (less, more, wide)
    ]
    model = wrapped_as(strategy, seeded(0))
    loose = [load_weights(model, spoiled, strict=False) for spoiled in (less, more)]
    assert fingerprint(model) == fingerprint(seeded(1))
    refused = [caught(lambda: load_weights(model, state, assign=True))]
    if strategy == "ddp":
        refused.append(caught(lambda: model.load_state_dict(state, assign=True)))
        names = {f"0.{name}": value for name, value in state.items()}
        refused.append(caught(lambda: nn.Sequential(model).load_state_dict(names, assign=True)))
    return strict, loose, {str(raised) for raised in refused}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_strict_loading_raises_names_and_loose_loading_returns_them(strategy):
    for (less, more, wide), loose, refused in run(spoiled_loads, strategy, world_size=2):
        assert re.search(r"(?s)Missing key.*last\.bias", less)
        assert re.search(r"(?s)Unexpected key.*module\.stranger", more)
        assert re.search(r"last\.weight.*9.*8", wide)
        assert loose == [(["last.bias"], []), ([], ["module.stranger"])]
        assert refused == {f"ValueError: {NO_ASSIGN}"}


def test_a_bare_module_can_be_assigned_to_and_one_under_dp_not():
    net, state = seeded(0), seeded(1).state_dict()
    with pytest.raises(ValueError, match=NO_ASSIGN):
        load_weights(wrapped_as("dp", net), state, assign=True)
    load_weights(net, state, assign=True)
    assert net.last.weight.data_ptr() == state["last.weight"].data_ptr()


def test_a_missing_entry_of_a_versioned_state_dict_raises():
    state = seeded(1).state_dict()  # carries the versions of its modules
    prefixed = nn.parallel.DataParallel(seeded(1)).state_dict()
    del state["norm.num_batches_tracked"], prefixed["module.norm.num_batches_tracked"]
    for today in (state, prefixed):
        with pytest.raises(RuntimeError, match=r'Missing.*"norm\.num_batches_tracked"'):
            load_weights(seeded(0), today)
    # It is not missed in one that says no version, as PyTorch has it.
    assert load_weights(seeded(0), dict(state)) == ([], [])


def test_names_that_fit_in_two_places_are_not_guessed():
    net = nn.Module()
    net.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    net.module = nn.Module()
    net.module.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    two = {"weight": torch.ones(1), "module.weight": torch.full((1,), 2.0)}
    load_weights(net, two)
    assert (net.weight.item(), net.module.weight.item()) == (1, 2)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "weight"'):
        load_weights(net, {f"module.{name}": value for name, value in two.items()})


class Stateful(nn.Linear):
    """Saves more than tensors."""

    def __init__(self):
        super().__init__(1, 1)
        self.seen = {}

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_the_extra_state_of_a_module_may_be_a_dict():
    source, net = Stateful(), nn.Sequential(Stateful())
    source.seen = {"rows": 3}
    load_weights(net, nn.Sequential(source).state_dict())
    assert net[0].seen == {"rows": 3}
    load_weights(net[0], source.state_dict())
    assert len(fingerprint(net)) == 64


def test_loading_invalid_weights_into_shards_raises_on_every_rank():
    first, second = run_caught(_spoiled_on_one_rank, world_size=2)
    assert (first.type, second.type) == ("TypeError", "RuntimeError")
    for raised in (first, second):
        assert "`state_or_path` must be a state dict or a path, but is an int" in raised.text
        assert raised.seconds < 10


def _spoiled_on_one_rank():
    model = wrap_model(seeded(0), "fsdp")
    load_weights(model, seeded(1).state_dict() if dist.get_rank() else 5)


UNLOADABLE = {
    "a shape": (torch.ones(9), "size mismatch for last.weight: copying a param with shape"),
    "an array": (np.ones((3, 8)), "expected torch.Tensor or Tensor-like object from checkpoint"),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", UNLOADABLE)
def test_a_wrong_value_on_rank_0_raises_on_every_rank(what, size):
    for raised in run_caught(_wrong_on_rank_0, what, world_size=size):
        assert raised.type == "RuntimeError"
        assert UNLOADABLE[what][1] in raised.text


def _wrong_on_rank_0(what):
    model, state = wrap_model(seeded(0), "fsdp"), seeded(1).state_dict()
    if dist.get_rank() == 0:
        state["last.weight"] = UNLOADABLE[what][0]
    load_weights(model, state)


class TwoNames(nn.Module):
    """Has a module under several names, as T5 and BART, and a tied parameter."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.shared = nn.Embedding(8, 4)
        self.stacks = nn.ModuleDict({"encoder": self.shared, "decoder": self.shared})
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8)
        self.head.weight = self.shared.weight


def load_under_two_names(strategies, folder):
    Checkpointer(folder).save(1, model=wrap_model(TwoNames(1), "ddp"))
    state, found = TwoNames(1).state_dict(), []
    later = {name: value for name, value in state.items() if not name.startswith("shared.")}
    for strategy, options in strategies:
        for given, strict in ((state, True), (later, False), (None, True)):
            model = wrap_model(TwoNames(2), strategy, **options)
            if given is None:
                Checkpointer(folder).restore(model=model)
            else:
                load_weights(model, given, strict=strict)
            found.append(fingerprint(model) == fingerprint(TwoNames(1)))
    return found


def test_a_module_that_has_several_names_loads_under_every_strategy(tmp_path):
    strategies = [("ddp", {}), ("exact", {})]
    strategies += [("fsdp", {}), ("fsdp", {"blocks": nn.LayerNorm})]
    found = run(load_under_two_names, strategies, tmp_path, world_size=2)
    assert found == [[True] * 3 * len(strategies)] * 2


def kept_objects(strategy):
    model = wrap_model(seeded(0), strategy)
    before = [(id(p), p.requires_grad) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load_weights(model, seeded(1).state_dict())
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    check_in_sync(model)
    assert [(id(p), p.requires_grad) for p in model.parameters()] == before
    assert fingerprint(model) != fingerprint(seeded(1))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_optimizer_still_trains_what_was_loaded(strategy):
    run(kept_objects, strategy, world_size=2)


def test_a_file_of_safetensors_is_loaded(tmp_path):
    source, model = seeded(1), seeded(0)
    save_file(source.state_dict(), tmp_path / "x.safetensors")
    assert load_weights(model, tmp_path / "x.safetensors") == ([], [])
    assert fingerprint(model) == fingerprint(source)


# fingerprint


def test_a_fingerprint_is_of_names_dtypes_and_bits():
    net = nn.Linear(2, 1)
    digest = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        digest.update(f"{name} torch.float32".encode())
        digest.update(tensor.numpy().tobytes())
    assert fingerprint(net) == digest.hexdigest()
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


def one(value, name="value"):
    module = nn.Module()
    module.register_buffer(name, value)
    return module


VALUES = {
    "numbers": torch.tensor([1.0, 2.0]),
    "another bit": torch.tensor([1.0, 2.0 + 2**-22]),
    "bfloat16": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "no dimension": torch.tensor(1.0),
    "bools": torch.tensor([True, False]),
    "empty": torch.empty(0),
    "zero": torch.tensor([0.0]),
    "minus zero": torch.tensor([-0.0]),
    "nan": torch.tensor([float("nan")]),
}


def test_fingerprints_tell_all_values_apart_and_are_the_same_for_the_same():
    prints = {what: fingerprint(one(value)) for what, value in VALUES.items()}
    assert len(set(prints.values())) == len(VALUES)
    assert prints == {what: fingerprint(one(value.clone())) for what, value in VALUES.items()}
    assert prints["zero"] != fingerprint(one(torch.tensor([0.0]), "other"))


LAYOUTS = [
    (torch.arange(6.0).view(2, 3).t(), torch.tensor([[0.0, 3], [1, 4], [2, 5]])),
    (torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(2, 3, 4, 4)),
]


@pytest.mark.parametrize(("value", "alike"), LAYOUTS)
def test_a_fingerprint_does_not_depend_on_the_layout_in_memory(value, alike):
    assert fingerprint(one(value)) == fingerprint(one(alike))


def printed(strategies):
    found = {}
    for strategy in strategies:
        for dtype in (torch.float32, torch.bfloat16):
            net = seeded(0).to(dtype)
            with torch.no_grad():
                net.last.weight.copy_(torch.arange(24.0).view(3, 8))
            net.register_buffer("scalar", torch.tensor(3, dtype=torch.int64))
            net.register_buffer("nothing", torch.empty(0, 4))
            net.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
            found.setdefault(dtype, set()).add(fingerprint(wrapped_as(strategy, net)))
    return found


def test_equal_weights_have_one_fingerprint_under_every_strategy_and_size():
    expected = printed(["none"])
    assert printed(["dp", "compiled"]) == expected
    strategies = ["ddp", "fsdp", "exact", "compiled inside ddp"]
    for size in (1, 3):
        assert run(printed, strategies, world_size=size) == [expected] * size


# check_in_sync


def zero_two(net):
    net.last.bias.zero_()
    net.norm.running_var.zero_()


DRIFTS = {
    "module.weight": (1, lambda net: net.module.weight[0, 0].add_(2**-20)),
    "norm.running_mean": (1, lambda net: net.norm.running_mean.fill_(5)),
    "norm.bias": (1, lambda net: net.norm.bias.fill_(-0.0)),
    "norm.running_var": (2, zero_two),
}


def drift(strategy, names, culprit):
    found = {}
    for name in names:
        model = wrap_model(seeded(0), strategy)
        check_in_sync(model)
        if dist.get_rank() == culprit:
            with torch.no_grad():
                DRIFTS[name][1](unwrap(model))
        found[name] = caught(check_in_sync, model)
        dist.barrier()  # the group works
    return found


@pytest.mark.parametrize(
    ("size", "culprit", "ranks"), [(2, 1, ["rank 0", "rank 1"]), (3, 0, ["rank 0", "ranks 1, 2"])]
)
def test_a_weight_that_differs_is_named_on_every_rank(size, culprit, ranks):
    for told in run(drift, "ddp", list(DRIFTS), culprit, world_size=size):
        for name, (number, _) in DRIFTS.items():
            raised = told[name]
            assert raised.type == "RuntimeError"
            table = "".join(rf"  {some}: SHA-256 [0-9a-f]{{16}}…\n" for some in ranks)
            assert re.fullmatch(
                rf"every rank must hold the same weights, but `{name}` differs between ranks "
                rf"\({number} of 9 parameters and buffers differ\):\n{table}Was it changed on some "
                r"ranks, or trained without the wrapper\?",
                raised.text,
            )


def test_fsdp_compares_replicated_tensors_and_no_unique_shards():
    for told in run(drift, "fsdp", ["norm.running_mean"], 1, world_size=2):
        text = "`norm.running_mean` differs between ranks (1 of 3 param"
        assert text in told["norm.running_mean"].text
    run(check_sharded, world_size=2)


def check_sharded():
    model = wrap_model(seeded(0), "fsdp")
    with torch.no_grad():
        unwrap(model).last.bias.to_local().add_(dist.get_rank())
    check_in_sync(model)


def copies_of_shards():
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names="ab")
    model = wrap_model(nn.Linear(4, 4), "fsdp", mesh=mesh)
    check_in_sync(model)
    if dist.get_rank() == 3:
        model.bias.to_local().detach().fill_(5)
    return caught(check_in_sync, model)


def test_shards_that_two_ranks_hold_are_compared():
    for told in run(copies_of_shards, world_size=4):
        assert "`bias` differs between ranks (1 of 2 parameters and buffers differ):" in told.text
        assert "  rank 1: shard [1], SHA-256" in told.text
        assert "  rank 3: shard [1], SHA-256" in told.text
        assert "  ranks 0, 2: shard [0], SHA-256" in told.text


def in_sync():
    net = seeded(0)
    with torch.no_grad():
        net.last.weight.fill_(float("nan"))
    check_in_sync(net)
    check_in_sync(nn.ReLU())
    others = caught(lambda: check_in_sync(nn.Linear(1, 1, bias=dist.get_rank() == 0)))
    model = DistributedDataParallel(seeded(0))
    model(torch.randn(4, 4) * (1 + dist.get_rank())).sum().backward()
    hidden = nn.Module()
    hidden.register_buffer("mask", torch.full((2,), dist.get_rank()), persistent=False)
    return others, caught(check_in_sync, model), caught(check_in_sync, hidden), fingerprint(hidden)


@pytest.mark.parametrize("size", [1, 2])
def test_nan_is_in_sync_but_other_names_and_buffers_are_not(size):
    for others, plain, hidden, same in run(in_sync, world_size=size):
        assert same == fingerprint(nn.ReLU())  # of what state_dict() has
        if size > 1:
            assert "rank 0: the parameter names=['bias', 'weight']" in others.text
            assert "Build the same model on every rank." in others.text
            assert "`norm.running_mean` differs between ranks (2 of 9" in plain.text
            assert "`mask` differs between ranks (1 of 1 parameters and buf" in hidden.text
        else:
            assert others is plain is hidden is None
