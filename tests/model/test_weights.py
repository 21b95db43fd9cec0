"""Weights in and out whatever the wrapper, fingerprints, and ranks that no longer agree."""

import copy
import hashlib
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import run, run_caught
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pardata import backward, check_in_sync, fingerprint, init, load_weights, unwrap, wrap_model

FSDP_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
needs_fsdp = pytest.mark.skipif(
    not FSDP_ON_CPU, reason=f"fully_shard of torch {torch.__version__} needs a GPU"
)
PREFIXES = ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]


class Net(nn.Module):
    """A child called `module`, as PyTorch's wrappers have, and batch norm's buffers."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, rows):
        return self.last(torch.relu(self.norm(self.module(rows))))


def seeded(seed):
    torch.manual_seed(seed)
    net = Net()
    net.norm.running_mean.normal_()
    return net


def wrapped_as(strategy, model):
    if strategy == "compiled":
        return torch.compile(wrap_model(model), backend="eager")
    if strategy == "compiled inside ddp":
        return wrap_model(torch.compile(model, backend="eager"), "ddp")
    return wrap_model(model, strategy)


# load_weights


def load_all(strategy, directory):
    """Load every spelling and say which left the model different from what was meant."""
    failed = []
    for number, prefix in enumerate(PREFIXES):
        source = seeded(number + 1)
        state = {prefix + name: value for name, value in source.state_dict().items()}
        before = list(state)
        for way in ("mapping", "path", "method"):
            model = wrapped_as(strategy, seeded(0))
            if way == "path":
                path = f"{directory}/weights-{dist.get_rank() if dist.is_initialized() else 0}.pt"
                torch.save(state, path)
                told = load_weights(model, path)
            elif way == "method" and hasattr(type(model), "scatter"):
                told = model.load_state_dict(state)
            else:
                told = load_weights(model, state)
            good = fingerprint(model) == fingerprint(source) and told == ([], [])
            if not good or list(state) != before:
                failed.append((strategy, prefix, way))
    return failed


@pytest.mark.parametrize("strategy", ["none", "dp", "compiled"])
def test_every_spelling_of_the_names_loads_in_a_single_process(strategy, tmp_path):
    assert load_all(strategy, tmp_path) == []


@pytest.mark.parametrize("strategy", ["ddp", "compiled inside ddp", "none"])
def test_every_spelling_of_the_names_loads_on_two_ranks(strategy, tmp_path):
    assert run(load_all, strategy, tmp_path, world_size=2) == [[], []]


@needs_fsdp
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_spelling_of_the_names_loads_into_shards(size, tmp_path):
    assert run(load_all, "fsdp", tmp_path, world_size=size) == [[]] * size


@given(st.sampled_from(PREFIXES), st.sampled_from(PREFIXES), st.integers(0, 5))
def test_names_are_recognised_with_prefixes_in_any_place(front, middle, dropped):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 1))
    source = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    state = {f"{front}{n[:2]}{middle}{n[2:]}": t for n, t in source.state_dict().items()}
    lost = list(state)[dropped]
    del state[lost]
    told = load_weights(model, state, strict=False)
    assert told.unexpected_keys == []
    assert told.missing_keys == [list(source.state_dict())[dropped]]
    for name, value in model.state_dict().items():
        assert torch.equal(value, source.state_dict()[name]) == (
            name not in told.missing_keys or name.endswith(("running_mean", "running_var"))
        )


def test_a_part_that_is_compiled_inside_the_model_takes_plain_names():
    source, net = seeded(1), seeded(0)
    net.last = torch.compile(net.last, backend="eager")
    assert "last._orig_mod.weight" in net.state_dict()
    load_weights(net, source.state_dict())
    assert torch.equal(net.last.weight, source.last.weight)


def spoiled(what):
    state = dict(seeded(1).state_dict())
    if what == "missing":
        del state["last.bias"]
    elif what == "unexpected":
        state["module.stranger"] = torch.ones(1)
    elif what == "shape":
        state["last.bias"] = torch.ones(7)
    return state


def strictly(strategy, what, strict):
    model = wrapped_as(strategy, seeded(0))
    before = fingerprint(model)
    told = load_weights(model, spoiled(what), strict=strict)
    return list(told.missing_keys), list(told.unexpected_keys), fingerprint(model) != before


SPOILED = [
    ("missing", r"(?s)(Missing key.*|missing are .*)last\.bias"),
    ("unexpected", r"(?s)(Unexpected key.*|unexpected .*)module\.stranger"),
    ("shape", r"(?s)last\.bias.*"),
]
EACH = ["none", "ddp", pytest.param("fsdp", marks=needs_fsdp)]


@pytest.mark.parametrize("strategy", EACH)
@pytest.mark.parametrize(("what", "text"), SPOILED, ids=[row[0] for row in SPOILED])
def test_strict_loading_raises_on_every_rank_and_names_the_entry(strategy, what, text):
    for raised in run_caught(strictly, strategy, what, True, world_size=2):
        assert raised.type in ("RuntimeError", "ValueError")
        assert re.search(text, raised.text)


@pytest.mark.parametrize("strategy", EACH)
@pytest.mark.parametrize(
    ("what", "told"),
    [("missing", (["last.bias"], [], True)), ("unexpected", ([], ["module.stranger"], True))],
)
def test_loading_that_is_not_strict_returns_the_names(strategy, what, told):
    assert run(strictly, strategy, what, False, world_size=2) == [told] * 2


def test_an_entry_that_older_versions_did_not_have_is_missed_in_a_state_dict_of_today():
    state = seeded(1).state_dict()  # carries the versions of its modules
    del state["norm.num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r'Missing.*"norm\.num_batches_tracked"'):
        load_weights(seeded(0), state)
    # ... with prefixes too ...
    wrapped = nn.parallel.DataParallel(seeded(1)).state_dict()
    del wrapped["module.norm.num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r'Missing.*"norm\.num_batches_tracked"'):
        load_weights(seeded(0), wrapped)
    # ... and is not in one that says no version, as PyTorch has it.
    assert load_weights(seeded(0), dict(state)) == ([], [])


def test_two_names_for_one_parameter_are_refused():
    state = seeded(1).state_dict()
    state["module.last.bias"] = state["last.bias"]
    text = "must name each parameter once, but 'last.bias' comes twice"
    with pytest.raises(ValueError, match=re.escape(text)):
        load_weights(seeded(0), state)


def test_names_that_fit_in_two_places_are_not_guessed():
    net = nn.Module()
    net.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    net.module = nn.Module()
    net.module.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    own = {"weight": torch.ones(1), "module.weight": torch.full((1,), 2.0)}
    load_weights(net, own)
    assert (net.weight.item(), net.module.weight.item()) == (1, 2)
    with pytest.raises(ValueError, match=r"but 'module\.weight' comes twice"):
        load_weights(net, {f"module.{name}": value for name, value in own.items()})


def test_a_checkpoint_of_several_things_is_told_which_part_to_pass():
    text = "but 'model' holds a dict: if this is a checkpoint of several things, pass the model's"
    with pytest.raises(TypeError, match=re.escape(text)):
        load_weights(seeded(0), {"epoch": 3, "model": seeded(1).state_dict()})
    with pytest.raises(TypeError, match=re.escape("checkpoint['model']")):
        load_weights(seeded(0), {"model": {}})


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


@pytest.mark.parametrize("state", [None, 3, [("weight", 1)]])
def test_what_is_no_state_dict_is_refused(state):
    kind = type(state).__name__
    text = f"`state_or_path` must be a state dict or a path, but is a {kind}"
    with pytest.raises(TypeError, match=re.escape(text)):
        load_weights(seeded(0), state)


def test_a_name_that_is_no_text_is_shown():
    text = "`state_or_path` must map names to tensors, but has the key 3 (int)"
    with pytest.raises(TypeError, match=re.escape(text)):
        load_weights(seeded(0), {"weight": torch.ones(1), 3: torch.ones(1)})


@pytest.mark.parametrize("model", [5, None, nn.Linear, [nn.Linear(1, 1)]])
@pytest.mark.parametrize(
    "call",
    [
        unwrap,
        fingerprint,
        check_in_sync,
        lambda model: load_weights(model, {}),
        lambda model: backward(model, lambda net, x: net(x).mean(), torch.ones(1)),
    ],
    ids=["unwrap", "fingerprint", "check_in_sync", "load_weights", "backward"],
)
def test_what_is_no_module_is_refused(call, model):
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module, but is (a|the)"):
        call(model)


def _no_module_on_one_rank():
    return check_in_sync(seeded(0) if dist.get_rank() else 5)


def test_what_is_no_module_on_one_rank_is_told_to_all():
    first, second = run_caught(_no_module_on_one_rank, world_size=2)
    assert (first.type, second.type) == ("TypeError", "RuntimeError")
    for raised in (first, second):
        assert "`model` must be a torch.nn.Module, but is a int" in raised.text


@needs_fsdp
def test_weights_that_do_not_fit_into_shards_on_one_rank_are_told_to_all():
    first, second = run_caught(_spoiled_on_one_rank, world_size=2)
    assert (first.type, second.type) == ("TypeError", "RuntimeError")
    for raised in (first, second):
        assert "`state_or_path` must be a state dict or a path, but is a int" in raised.text
        assert raised.seconds < 10


def _spoiled_on_one_rank():
    model = wrapped_as("fsdp", seeded(0))
    load_weights(model, seeded(1).state_dict() if dist.get_rank() else 5)


def test_a_file_that_holds_more_than_weights_is_not_run(tmp_path):
    torch.save(Net(), tmp_path / "model.pt")
    with pytest.raises(Exception, match=r"[Ww]eights.?only"):
        load_weights(seeded(0), tmp_path / "model.pt")


def test_a_file_that_is_not_there_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_weights(seeded(0), tmp_path / "nothing.pt")


def test_a_bare_module_can_be_assigned_to():
    net, state = seeded(0), seeded(1).state_dict()
    load_weights(net, state, assign=True)
    assert net.last.weight.data_ptr() == state["last.weight"].data_ptr()


def assigns(how, strategy):
    model = wrapped_as(strategy, seeded(0))
    parameters = list(unwrap(model).parameters())
    state = seeded(1).state_dict()
    try:
        if how == "load_weights":
            load_weights(model, state, assign=True)
        elif how == "method":
            model.load_state_dict(state, assign=True)
        else:
            nn.Sequential(model).load_state_dict(
                {f"0.{n}": t for n, t in state.items()}, assign=True
            )
    finally:
        kept = all(a is b for a, b in zip(parameters, unwrap(model).parameters(), strict=True))
        assert kept


@pytest.mark.parametrize("how", ["load_weights", "method", "parent"])
@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_assigning_to_a_wrapped_model_is_refused(how, strategy):
    text = "`assign` must be False for a wrapped model: assign to the module before wrapping it"
    if strategy == "dp":
        with pytest.raises(ValueError, match=text):
            assigns(how, strategy)
        return
    for raised in run_caught(assigns, how, strategy, world_size=2):
        assert (raised.type, raised.text) == ("ValueError", text)


@needs_fsdp
def test_strict_loading_into_shards_says_what_to_do():
    for raised in run_caught(strictly, "fsdp", "missing", True, world_size=2):
        assert raised.type == "RuntimeError"
        assert raised.text == (
            "the weights must have the names of FSDPNet, but missing are ['last.bias'] and "
            "unexpected []: pass the weights of this model, or strict=False"
        )


@needs_fsdp
def test_assigning_to_a_sharded_model_is_refused():
    for raised in run_caught(assigns, "load_weights", "fsdp", world_size=2):
        assert raised.type == "ValueError"


def kept_objects(strategy):
    model = wrapped_as(strategy, seeded(0))
    before = [(id(p), p.requires_grad) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    load_weights(model, seeded(1).state_dict())
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    check_in_sync(model)
    after = [(id(p), p.requires_grad) for p in model.parameters()]
    return before == after, fingerprint(model) != fingerprint(seeded(1))


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=needs_fsdp)])
def test_the_optimizer_still_trains_what_was_loaded(strategy):
    assert run(kept_objects, strategy, world_size=2) == [(True, True)] * 2


# fingerprint


def test_a_fingerprint_is_of_names_dtypes_and_bits():
    net = nn.Linear(2, 1)
    digest = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        digest.update(f"{name} torch.float32".encode())
        digest.update(tensor.numpy().tobytes())
    assert fingerprint(net) == digest.hexdigest()


def one(value, name="value"):
    module = nn.Module()
    module.register_buffer(name, value)
    return module


VALUES = {
    "numbers": torch.tensor([1.0, 2.0]),
    "another bit": torch.tensor([1.0, 2.0 + 2**-22]),
    "bfloat16": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "half": torch.tensor([1.0, 2.0], dtype=torch.float16),
    "no dimension": torch.tensor(1.0),
    "whole": torch.tensor([1, 2]),
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


def test_a_fingerprint_does_not_depend_on_the_layout_in_memory():
    matrix = torch.arange(6.0).view(2, 3)
    images = torch.randn(2, 3, 4, 4)
    assert fingerprint(one(matrix.t().contiguous().t())) == fingerprint(one(matrix))
    assert fingerprint(one(torch.arange(12.0).view(2, 6)[:, ::2])) == fingerprint(
        one(torch.tensor([[0.0, 2, 4], [6, 8, 10]]))
    )
    as_channels_last = images.to(memory_format=torch.channels_last)
    assert fingerprint(one(as_channels_last)) == fingerprint(one(images))


def test_taking_a_fingerprint_changes_nothing():
    net = seeded(0)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fingerprint(net)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


def printed(strategy, dtype):
    net = seeded(0).to(dtype)
    with torch.no_grad():
        net.last.weight.copy_(torch.arange(24.0).view(3, 8))
    net.register_buffer("scalar", torch.tensor(3, dtype=torch.int64))
    net.register_buffer("nothing", torch.empty(0, 4))
    net.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
    return fingerprint(wrapped_as(strategy, net))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_weights_have_one_fingerprint_under_every_strategy_and_size(dtype):
    expected = printed("none", dtype)
    assert {printed(strategy, dtype) for strategy in ("dp", "compiled")} == {expected}
    for strategy in ["ddp", *(["fsdp"] if FSDP_ON_CPU else [])]:
        for size in (1, 3):
            assert run(printed, strategy, dtype, world_size=size) == [expected] * size
    assert run(printed, "compiled inside ddp", dtype, world_size=2) == [expected] * 2


# check_in_sync


def drift(what, strategy, culprit):
    model = wrapped_as(strategy, seeded(0))
    check_in_sync(model)
    net = unwrap(model)
    if dist.get_rank() == culprit:
        with torch.no_grad():
            if what == "weight":
                net.module.weight[0, 0] += 2**-20
            elif what == "buffer":
                net.norm.running_mean[1] = 5
            elif what == "count":
                net.norm.num_batches_tracked += 1
            elif what == "sign of zero":
                net.norm.bias[0] = -0.0
            elif what == "two":
                net.last.bias.zero_()
                net.norm.running_var.zero_()
    try:
        check_in_sync(model)
    except RuntimeError as error:
        number = torch.ones(1)
        dist.all_reduce(number)  # the group works
        return str(error), number.item()
    return None


DRIFTS = [
    ("weight", "module.weight", 1),
    ("buffer", "norm.running_mean", 1),
    ("count", "norm.num_batches_tracked", 1),
    ("sign of zero", "norm.bias", 1),
    ("two", "norm.running_var", 2),
]


@pytest.mark.parametrize(("what", "name", "number"), DRIFTS, ids=[row[0] for row in DRIFTS])
def test_a_parameter_or_buffer_that_drifted_is_named_on_every_rank(what, name, number):
    told = run(drift, what, "ddp", 1, world_size=2)
    assert told == [told[0]] * 2
    text, total = told[0]
    assert total == 2
    assert text == (
        f"every rank must hold the same weights, but `{name}` differs between ranks 0 | 1 "
        f"({number} of 9 parameters and buffers differ): was it changed on some ranks only, or "
        f"trained without the wrapped model's forward?"
    )


@pytest.mark.parametrize(
    ("size", "culprit", "ranks"), [(2, 0, "0 | 1"), (3, 0, "0 | 1, 2"), (4, 2, "0, 1, 3 | 2")]
)
def test_the_ranks_that_drifted_are_told_apart_on_every_rank(size, culprit, ranks):
    told = run(drift, "weight", "ddp", culprit, world_size=size)
    assert told == [told[0]] * size
    assert f"`module.weight` differs between ranks {ranks} (1 of 9" in told[0][0]


@needs_fsdp
def test_under_fsdp_what_every_rank_holds_whole_is_compared():
    told = run(drift, "buffer", "fsdp", 1, world_size=2)
    assert all("`norm.running_mean` differs between ranks 0 | 1 (1 of 3" in t for t, _ in told)


@needs_fsdp
def test_shards_that_change_have_no_copy_to_differ_from():
    assert run(check_sharded, world_size=2) == [None, None]


def check_sharded():
    model = wrapped_as("fsdp", seeded(0))
    with torch.no_grad():
        unwrap(model).last.bias.to_local().add_(dist.get_rank())
    check_in_sync(model)


def nan_everywhere():
    net = seeded(0)
    with torch.no_grad():
        net.last.weight.fill_(float("nan"))
    check_in_sync(net)
    check_in_sync(nn.ReLU())


def test_nan_equals_nan_and_a_model_without_weights_is_in_sync():
    assert run(nan_everywhere, world_size=2) == [None, None]


def other_names():
    check_in_sync(nn.Linear(1, 1, bias=dist.get_rank() == 0))


def test_models_with_other_names_are_shown_with_theirs():
    for raised in run_caught(other_names, world_size=2):
        assert raised.type == "RuntimeError"
        assert "rank 0: the parameter names=['bias', 'weight']" in raised.text
        assert "Build the same model on every rank." in raised.text


def test_a_single_process_is_in_sync_with_itself():
    check_in_sync(seeded(0))


def alone():
    with init():
        check_in_sync(wrap_model(seeded(0), "ddp"))


def test_one_process_in_a_group_is_too():
    run(alone, world_size=1)


def steps_of_plain_ddp():
    model = DistributedDataParallel(seeded(0))
    model(torch.randn(4, 4) * (1 + dist.get_rank())).sum().backward()
    check_in_sync(model)


def test_after_a_step_of_plain_ddp_batch_norm_differs():
    for raised in run_caught(steps_of_plain_ddp, world_size=2):
        assert "`norm.running_mean` differs between ranks 0 | 1 (2 of 9" in raised.text
