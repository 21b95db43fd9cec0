"""The wrappers read, write and load through to their module, and keep buffers equal."""

import copy
import io
import logging
import pickle
import re
import warnings
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import run, run_caught
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pardata import check_in_sync, fingerprint, load_weights, unwrap, wrap_model
from pardata.model._dp import ReadThroughDP, _rows
from pardata.ranks._process import process

Pair = namedtuple("Pair", "loss scores")  # noqa: PYI024  # the plain kind is what is tested


class Net(nn.Module):
    """What real models have beside layers: settings, state, properties and methods."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.criterion = nn.CrossEntropyLoss()
        self.register_buffer("mask", torch.ones(8))
        self.verbose = False
        self.seen = []
        self.device = "its own"  # DDP and DataParallel have attributes of this name or like it
        self._hidden = "inside"

    def forward(self, rows):
        self.seen.append((len(rows), self.verbose))
        return self.last(torch.relu(self.norm(self.first(rows))) * self.mask)

    @property
    def width(self):
        return self.last.out_features

    @property
    def broken(self):
        return self.no_such_thing

    def training_step(self, rows, targets):
        return self.criterion(self(rows), targets)

    @torch.no_grad()
    def predict(self, rows):
        return self(rows).argmax(1)

    def loss(self, scores, targets):
        return self.criterion(scores, targets)

    def through(self, wrapper, rows):
        return wrapper(rows).sum()

    def other_forward(self, rows):
        return self.last(self.norm(self.first(rows)))

    def fails(self):
        raise KeyError(self)


def batch(rows=6, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=numbers)


def wrapped(strategy="ddp", seed=0, kind=Net, **options):
    torch.manual_seed(seed)
    if strategy == "dp":
        options = {"device": "cpu", "device_ids": [], **options}
    return wrap_model(kind(), strategy, **options)


def on_each(check, *args, strategies=("dp", "ddp")):
    """Run a check that asserts, for the wrappers that a CPU has."""
    for strategy in strategies:
        if strategy == "dp":
            check("dp", *args)
        else:
            run(check, strategy, *args, world_size=2)


# Attributes


def reads(strategy):
    model = wrapped(strategy)
    net = unwrap(model)
    assert model.first is net.first
    assert model.mask is net.mask
    assert model.verbose is False
    assert model.width == 3
    assert model._hidden == "inside"
    assert getattr(model, "nothing", "default") == "default"
    assert not hasattr(model, "broken")
    assert {"verbose", "width", "predict", "first", "mask", "module", "state_dict"} <= set(
        dir(model)
    )
    assert dir(model) == sorted(set(dir(model)))
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        _ = model.nothing
    assert model.get_submodule("first") is net.first


def test_attributes_are_read_through():
    on_each(reads)


def writes(strategy):
    """The article's bug: an attribute set on the wrapper was not seen inside the model."""
    model = wrapped(strategy)
    net = unwrap(model)
    model.verbose = True
    model(batch())
    assert net.seen == [(6, True)]
    assert "verbose" not in vars(model)
    model.new = 3
    assert (net.new, model.new) == (3, 3)
    del model.new
    assert not hasattr(net, "new")
    with pytest.raises(AttributeError, match="new"):
        del model.new
    model.mask = torch.zeros(8)
    assert net.mask.sum() == 0
    assert torch.equal(model(batch()), net.last.bias.expand(6, 3))


def test_attributes_set_and_deleted_on_the_wrapper_are_those_of_the_model():
    on_each(writes)


def own_names(strategy):
    model = wrapped(strategy)
    net = unwrap(model)
    model._hidden = "outside"
    assert (net._hidden, model._hidden) == ("inside", "outside")
    del model._hidden
    assert model._hidden == "inside"
    model.device_ids = []  # DDP's and DataParallel's
    assert model.device_ids == []
    assert not hasattr(net, "device_ids")
    model.eval()
    assert (model.training, net.training) == (False, False)
    model.train()
    assert (model.training, net.training) == (True, True)


def test_names_with_an_underscore_and_names_of_the_wrapper_stay_on_the_wrapper():
    on_each(own_names)


def assigns(strategy, what):
    model = wrapped(strategy)
    before = list(unwrap(model).state_dict())
    {
        "module": lambda: setattr(model, "last", nn.Linear(8, 3)),
        "new module": lambda: setattr(model, "head", nn.Linear(8, 3)),
        "inside": lambda: setattr(model, "module", nn.Linear(8, 3)),
        "parameter": lambda: setattr(model, "scale", nn.Parameter(torch.ones(1))),
        "register_parameter": lambda: model.register_parameter(
            "scale", nn.Parameter(torch.ones(1))
        ),
        "register no parameter": lambda: model.register_parameter("scale", None),
        "add_module": lambda: model.add_module("head", nn.Linear(1, 1)),
        "register_module": lambda: model.register_module("head", nn.Linear(1, 1)),
    }[what]()
    assert list(unwrap(model).state_dict()) == before


ASSIGNED = [
    ("module", "`last` must be set before the model is wrapped, but a Module is assigned through"),
    ("new module", "`head` must be set before the model is wrapped, but a Module"),
    ("inside", "`module` must be set before the model is wrapped"),
    ("parameter", "`scale` must be set before the model is wrapped, but a Parameter is assigned"),
    ("register_parameter", "`scale` must be set before the model is wrapped, but a Parameter"),
    ("register no parameter", "`scale` must be set before the model is wrapped"),
    ("add_module", "`head` must be set before the model is wrapped, but a Module"),
    ("register_module", "set it on the module, then call wrap_model"),
]


@pytest.mark.parametrize(("what", "text"), ASSIGNED, ids=[row[0] for row in ASSIGNED])
def test_what_would_train_without_being_synchronised_cannot_be_assigned(what, text):
    with pytest.raises(TypeError, match=re.escape(text)):
        assigns("dp", what)


def assigns_all(strategy):
    for what, text in ASSIGNED:
        with pytest.raises(TypeError, match=re.escape(text)):
            assigns(strategy, what)


def test_nor_under_ddp():
    run(assigns_all, "ddp", world_size=2)


def registers(strategy):
    model = wrapped(strategy, kind=Bare)
    rank = dist.get_rank() if dist.is_initialized() else 0
    model.register_buffer("count", torch.zeros(1) + rank)
    model.register_buffer("passing", torch.zeros(1), persistent=False)
    assert list(unwrap(model).state_dict()) == ["count", "line.weight", "line.bias"]
    model(batch()).sum().backward()
    check_in_sync(model)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, rows):
        return self.line(rows)


def test_a_buffer_registered_through_the_wrapper_is_the_models_and_kept_equal():
    on_each(registers)


def logged(strategy):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logging.getLogger("pardata").addHandler(handler)
    wrapped(strategy)
    wrapped(strategy)
    assert wrapped(strategy).device != "its own"
    wrapped(strategy, kind=Bare)
    return lines


def test_names_that_ddp_hides_are_logged_once_on_rank_0():
    line = "[0/2] ReadThroughDDP hides `device` of Net: read it as unwrap(model).device"
    assert run(logged, "ddp", world_size=2) == [[("WARNING", line)], []]


class Hiding(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.device_ids = []

    def gather(self):
        return self


def test_names_that_dp_hides_are_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(process, "said", set())
    wrapped("dp", kind=Hiding)
    wrapped("dp", kind=Hiding)
    assert [r.getMessage() for r in caplog.records if "hides" in r.getMessage()] == [
        (
            "[0/1] ReadThroughDP hides `device_ids`, `gather` of Hiding: read it as "
            "unwrap(model).device_ids"
        )
    ]


# state_dict


def names(strategy):
    model = wrapped(strategy)
    plain = unwrap(model).state_dict()
    state = model.state_dict()
    assert list(state) == list(plain) == list(Net().state_dict())
    assert state._metadata.keys() == plain._metadata.keys()
    assert all(not value.requires_grad for value in state.values())
    assert model.state_dict(keep_vars=True)["last.bias"] is unwrap(model).last.bias
    assert list(model.state_dict(prefix="net.")) == [f"net.{name}" for name in state]
    bare = Net()
    bare.load_state_dict(state, strict=True)
    assert fingerprint(bare) == fingerprint(model)


def test_a_state_dict_has_the_names_of_the_module_and_loads_into_it():
    on_each(names)


class Inner(nn.Module):
    """A model that has a child called `module`, twice, and a weight at each level."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.module.module = nn.Linear(4, 3)
        self.module.norm = nn.BatchNorm1d(3)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, rows):
        return self.module.norm(self.module.module(self.module(rows))) * self.weight


def nests(strategy, kind):
    torch.manual_seed(1)
    source = nn.Sequential(nn.Linear(4, 4), kind())
    state = source.state_dict()
    expected = fingerprint(source)

    def parent():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), wrapped(strategy, kind=kind))

    model = parent()
    assert list(model.state_dict()) == list(state)
    assert list(nn.ModuleDict({"net": model}).state_dict())[-1] == f"net.{list(state)[-1]}"
    # Plain names, twice: the dict that is loaded stays as it was.
    for _ in range(2):
        before = list(state)
        told = model.load_state_dict(state)
        assert (list(told.missing_keys), list(told.unexpected_keys)) == ([], [])
        assert fingerprint(model) == expected
        assert list(state) == before
    # As PyTorch's wrapper would have saved it.
    prefixed = {n if n[0] == "0" else f"1.module.{n[2:]}": t for n, t in state.items()}
    model = parent()
    model.load_state_dict(prefixed)
    assert fingerprint(model) == expected
    # By load_weights, one more level down.
    model = nn.Sequential(parent())
    load_weights(model, {f"module.0.{name}": value for name, value in state.items()})
    assert fingerprint(model[0]) == expected
    # What is missing or too much is still found.
    lost = dict(state)
    del lost["1." + next(iter(kind().state_dict()))]
    with pytest.raises(RuntimeError, match="Missing key"):
        parent().load_state_dict(lost)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        parent().load_state_dict({**state, "1.stranger": torch.ones(1)})


@pytest.mark.parametrize("kind", [Net, Inner])
def test_a_wrapped_child_saves_and_loads_like_the_bare_one(kind):
    on_each(nests, kind)


def copies(strategy):
    model = wrapped(strategy)
    model.verbose = True
    model(batch()).sum().backward()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved(model)):
        assert type(again) is type(model)
        assert fingerprint(again) == fingerprint(model)
        again.verbose = 5
        assert (unwrap(again).verbose, unwrap(model).verbose) == (5, True)
        with pytest.raises(TypeError):
            again.last = nn.Linear(1, 1)
        rank = dist.get_rank() if dist.is_initialized() else 0
        again.zero_grad()
        for step in range(2):
            again(batch(seed=10 * step + rank)).sum().backward()
            check_in_sync(again)
        if dist.is_initialized():
            same(again.last.weight.grad)
        assert fingerprint(again) != fingerprint(model)  # batch norm went on, in the copy alone


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def same(tensor):
    mean = tensor.clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / dist.get_world_size(), tensor)


def test_copies_and_pickles_work_and_train_in_step():
    on_each(copies)


# Methods


def guards(strategy="ddp", kind=None):
    model = wrapped(strategy)
    if kind == "compiled inside":
        torch.manual_seed(0)
        model = wrap_model(torch.compile(Net(), backend="eager"), "ddp")
    rows, targets = batch(), torch.zeros(6, dtype=torch.int64)
    with pytest.raises(RuntimeError) as raised:
        model.training_step(rows, targets)
    assert str(raised.value) == (
        "`training_step` must not train through DistributedDataParallel, but it runs Net with "
        "gradients, which would not be synchronised: call it from the model's forward, or under "
        "torch.no_grad() if nothing is trained, or as unwrap(model).training_step if the ranks "
        "shall differ"
    )
    with torch.no_grad():
        assert model.training_step(rows, targets) > 0
    with torch.inference_mode():
        assert model.training_step(rows, targets) > 0
    assert model.predict(rows).shape == (6,)
    model.loss(model(rows), targets).backward()
    model.through(model, rows).backward()
    assert unwrap(model).training_step(rows, targets) > 0
    with pytest.raises(KeyError, match="Net"):
        model.fails()
    # After all that nothing of the guard is left behind.
    assert not torch.nn.modules.module._global_forward_pre_hooks
    nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
    assert model.training_step.__name__ == "training_step"
    model.requires_grad_(False)
    assert model.training_step(rows, targets) > 0


def test_a_method_that_would_train_unsynchronised_raises_and_others_do_not():
    run(guards, world_size=2)


def test_so_it_is_with_a_module_compiled_before():
    run(guards, "ddp", "compiled inside", world_size=2)


def test_dp_has_nothing_to_guard():
    model = wrapped("dp")
    model.training_step(batch(), torch.zeros(6, dtype=torch.int64)).backward()
    assert model.last.weight.grad is not None


def in_its_own_forward():
    model = wrapped()
    net = unwrap(model)
    net.forward = net.other_forward
    model(batch()).sum().backward()
    same(net.last.weight.grad)


def test_a_method_called_from_the_models_forward_is_synchronised():
    run(in_its_own_forward, world_size=2)


# Buffers


def trains(steps, kind=Net, **options):
    rank = dist.get_rank()
    model = wrapped(kind=kind, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(seed=10 * step + rank)).square().mean().backward()
        optimizer.step()
        check_in_sync(model)
    return fingerprint(model)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_replicas_with_batch_norm_are_equal_after_every_step(size):
    assert len(set(run(trains, 3, world_size=size))) == 1


def plain_steps():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    model(batch(seed=rank)).square().mean().backward()
    first = [fingerprint(model)]
    model(batch(seed=rank)).square().mean().backward()
    return [*first, fingerprint(model)]


def test_under_plain_ddp_they_would_differ():
    (a, b), (c, d) = run(plain_steps, world_size=2)
    assert a != c
    assert b != d


def as_rank_0():
    """Rank 0's statistics are what all ranks take, as with plain DDP."""
    torch.manual_seed(0)
    net = Net()
    for step in range(3):
        net(batch(seed=10 * step))
    model = wrapped()
    for step in range(3):
        model(batch(seed=10 * step + dist.get_rank())).sum().backward()
    return torch.equal(model.norm.running_mean, net.norm.running_mean), int(
        model.norm.num_batches_tracked
    )


def test_all_ranks_take_rank_0s_buffers():
    assert run(as_rank_0, world_size=2) == [(True, 3)] * 2


def rank_0_apart(flag, option):
    torch.manual_seed(0)
    net = Net()
    net.mask.fill_(dist.get_rank())
    model = wrap_model(net, "ddp", **{option: flag})
    start = net.mask[0].item()
    net.mask.fill_(dist.get_rank())
    model(batch()).sum().backward()
    return start, net.mask[0].item()


FLAGS = ["broadcast_buffers"]
if hasattr(DistributedDataParallel, "broadcast_buffers"):  # a property since there is a new name
    FLAGS.append("forward_sync_buffers")


@pytest.mark.parametrize("option", FLAGS)
@pytest.mark.parametrize(("flag", "after"), [(True, 0), (False, 1)])
def test_buffers_start_equal_and_stay_apart_only_where_asked(option, flag, after):
    assert run(rank_0_apart, flag, option, world_size=2) == [(0, 0), (0, after)]


def modes():
    rank = dist.get_rank()
    told = {}
    model = wrapped()
    net = unwrap(model)

    def differs_after(how):
        net.mask.fill_(1 + rank)
        how()
        both = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(both, net.mask[:1])
        net.mask.fill_(1)
        return both[0] != both[1]

    def forward():
        model(batch())

    def without_gradients():
        with torch.no_grad():
            model(batch())

    def without_sync():
        with model.no_sync():
            model(batch())

    def inside_eval():
        net.eval()
        model(batch())

    def inside_train():
        model.eval()
        net.train()
        model(batch())
        model.train()

    for how in (forward, without_gradients, without_sync, inside_eval, inside_train):
        model.train()
        told[how.__name__] = bool(differs_after(how))
    return told


def test_buffers_are_sent_after_a_training_forward_that_synchronises_and_no_other():
    expected = {
        "forward": False,
        "without_gradients": True,
        "without_sync": True,
        "inside_eval": True,
        "inside_train": False,
    }
    assert run(modes, world_size=2) == [expected] * 2


def lonely(context, mode):
    model = wrapped()
    for step in range(2):  # the second forward rebuilds DDP's buckets, once
        model(batch(seed=step)).sum().backward()
    total = torch.ones(1)
    for alone in (0, 1):
        if dist.get_rank() == alone:
            model.train(mode)
            with context():
                for _ in range(3):
                    model(batch())
            model.state_dict()
            model.train()
        dist.all_reduce(total)
    model(batch()).sum().backward()
    same(model.last.weight.grad)
    return total.item()


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_on_one_rank_alone_waits_for_nobody(context, mode):
    assert run(lonely, context, mode, world_size=2, timeout=20) == [4, 4]


def evaluates_alone():
    model = wrapped()
    for step in range(2):
        model(batch(seed=step)).sum().backward()
    model.eval()
    if dist.get_rank() == 0:
        model(batch())  # with gradients, as a careless evaluation has
    dist.barrier()
    model.train()
    model(batch()).sum().backward()
    check_in_sync(model)


def test_no_collective_hides_in_an_evaluation_even_with_gradients():
    run(evaluates_alone, world_size=2, timeout=20)


def twice():
    model = wrapped()
    rank = dist.get_rank()
    for step in range(2):
        model.zero_grad()
        (
            model(batch(seed=step)).sum() + model(batch(seed=step + 5 + rank)).square().sum()
        ).backward()
        check_in_sync(model)
    same(model.last.weight.grad)


def test_two_forwards_before_one_backward_work_with_batch_norm():
    run(twice, world_size=2)


class Masks(nn.Module):
    """A buffer that autograd saves, and one that the forward replaces."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 0.0]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("turned", torch.ones(3, 2).t())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", None)

    def forward(self, rows):
        self.calls = self.calls + 1 + dist.get_rank()
        return self.line(rows) * self.mask


def masks():
    model = wrapped(kind=Masks)
    outputs = [model(batch(seed=step)) for step in range(3)]
    sum(output.sum() for output in outputs).backward()
    check_in_sync(model)
    assert model.line.weight.grad[1].abs().sum() == 0
    assert model.line.weight.grad[0].abs().sum() > 0
    return int(model.calls)


def test_buffers_that_autograd_saved_and_buffers_that_were_replaced_are_fine():
    assert run(masks, world_size=2) == [3, 3]


def accumulates():
    rank = dist.get_rank()
    model = wrapped()
    with model.no_sync():
        for step in range(2):
            model(batch(seed=step + 3 * rank)).sum().backward()
    model(batch(seed=7 + rank)).sum().backward()
    check_in_sync(model)
    same(model.last.weight.grad)


def test_buffers_are_equal_once_accumulated_gradients_are_synchronised():
    run(accumulates, world_size=2)


def looked_for():
    model = wrapped(kind=Bare)
    walks = []
    model.module.named_buffers = lambda *args, **kwargs: walks.append(1) or iter(())
    for step in range(3):
        model(batch(seed=step)).sum().backward()
    return len(walks)


def test_a_model_without_buffers_is_not_walked_at_every_step():
    assert run(looked_for, world_size=2) == [0, 0]


# Uneven inputs


def joins(how, **options):
    rank = dist.get_rank()
    model = wrapped(**options)
    context = model.join() if how == "join" else Join([model])
    with context:
        for step in range(2 + 2 * rank):
            model(batch(seed=step)).sum().backward()
    if options:
        told = torch.tensor([model.norm.num_batches_tracked])
        both = [torch.zeros_like(told) for _ in range(2)]
        dist.all_gather(both, told)
        return [int(number) for number in both]
    check_in_sync(model)
    # Afterwards everything is as before.
    if rank == 0:
        with torch.no_grad():
            model(batch())
    dist.barrier()
    for step in range(2):
        model(batch(seed=step + rank)).sum().backward()
        check_in_sync(model)
    return int(model.norm.num_batches_tracked)


@pytest.mark.parametrize("how", ["join", "Join"])
def test_uneven_inputs_do_not_hang_in_join_and_replicas_are_equal_after_it(how):
    # Rank 1 went on for longest, so its statistics count; rank 0's own evaluation counts there.
    first, second = run(joins, how, world_size=2, timeout=20)
    assert first == second


def joins_apart():
    return joins("join", broadcast_buffers=False)


def test_join_leaves_buffers_apart_where_asked():
    assert run(joins_apart, world_size=2, timeout=20) == [[2, 4]] * 2


def join_disabled():
    model = wrapped()
    with model.join(enable=False):
        for step in range(2):
            model(batch(seed=step + dist.get_rank())).sum().backward()
            check_in_sync(model)


def test_a_join_that_is_switched_off_changes_nothing():
    run(join_disabled, world_size=2, timeout=20)


# Unused parameters


class Unused(Net):
    def forward(self, rows):
        return self.first(rows)


class Spare(nn.Module):
    """The unused one stands in the middle, behind a frozen one."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.used = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)
        self.end = nn.Linear(4, 1)

    def forward(self, rows):
        return self.end(self.used(self.frozen(rows)))


def unused(kind, steps=2, *, detail=False, **options):
    if detail:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    model = wrapped(kind=kind, **options)
    for step in range(steps):
        model(batch(seed=step)).sum().backward()
    return model.first.weight.grad is not None if kind is Unused else None


def unused_in_detail(kind):
    unused(kind, detail=True)


@pytest.mark.parametrize("detail", [False, True])
def test_unused_parameters_are_named_on_every_rank(detail):
    for raised in run_caught(unused_in_detail if detail else unused, Spare, world_size=2):
        assert raised.type == "RuntimeError"
        assert raised.text == (
            "every parameter must take part in the loss, but `spare.weight`, `spare.bias` did not "
            "in the last step, so its gradient was not synchronised: use all outputs in the loss, "
            "freeze what is not trained (requires_grad_(False)), or pass "
            "wrap_model(..., find_unused_parameters=True)"
        )
        assert "Expected to have finished reduction in the prior iteration" in raised.cause


def frozen_later():
    model = wrapped(kind=Bare2)
    model.first.requires_grad_(False)
    for step in range(2):
        model(batch(seed=step)).sum().backward()


class Bare2(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, rows):
        return self.second(self.first(rows))


def test_what_was_frozen_after_wrapping_is_named_too():
    for raised in run_caught(frozen_later, world_size=2):
        assert "but `first.weight`, `first.bias` did not in the last step" in raised.text


def unused_is_found(option):
    return unused(Unused, 3, **{option: True})


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_unused_parameters_are_fine_where_ddp_is_told_to_look(option):
    assert run(unused_is_found, option, world_size=2) == [True, True]


class Failing(Bare):
    def forward(self, rows):
        msg = "the model's own"
        raise RuntimeError(msg)


def fails():
    wrapped(kind=Failing)(batch())


def test_other_errors_come_through_as_they_are():
    for raised in run_caught(fails, world_size=2):
        assert (raised.type, raised.text) == ("RuntimeError", "the model's own")


# With torch.compile and checkpointing


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, rows):
        return self.last(torch.relu(self.norm(self.first(rows))))


def compiles(how):
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if how == "inside":
            model = wrap_model(torch.compile(net, backend="eager"), "ddp")
        elif how == "outside":
            model = torch.compile(wrap_model(net, "ddp"), backend="eager")
        else:
            model = wrap_model(net, "ddp")
            if how == "in place":
                model.compile(backend="eager")
        assert unwrap(model) is net
        for step in range(3):
            model.zero_grad()
            model(batch(seed=3 * step + rank)).square().mean().backward()
            check_in_sync(model)
        model.eval()
        assert not net.training
        with torch.no_grad():
            if rank == 0:
                model(batch())
    if how != "outside":
        assert list(model.state_dict()) == list(net.state_dict())
    model.flag = 3
    assert net.flag == 3
    same(net.last.weight.grad)
    return fingerprint(model), net.last.weight.grad


def test_compile_inside_outside_and_in_place_train_as_without():
    expected, grad = run(compiles, "not at all", world_size=2)[0]
    for how in ("inside", "outside", "in place"):
        for told, ours in run(compiles, how, world_size=2):
            assert told == expected
            torch.testing.assert_close(ours, grad)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, rows):
        hidden = checkpoint(self.first, rows, use_reentrant=False)
        return checkpoint(self.last, torch.tanh(hidden), use_reentrant=False)


def test_gradient_checkpointing_trains_in_step():
    assert len(set(run(trains, 3, Checkpointed, world_size=2))) == 1


# What dp makes of the outputs of several devices


def gathered(outputs, rows, dim=0):
    model = wrapped("dp")
    model._rows = rows
    vars(model)["dim"] = dim  # DataParallel sets it only where there are GPUs
    return model.gather(outputs, torch.device("cpu"))


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(-100, 100)), min_size=1, max_size=5))
def test_scalars_become_their_mean_weighted_by_rows(pieces):
    rows = [number for number, _ in pieces]
    scalars = [torch.tensor(value, dtype=torch.float64) for _, value in pieces]
    expected = sum(n * v for n, v in pieces) / sum(rows)
    result = gathered(scalars, rows)
    assert result.shape == ()
    assert result.item() == pytest.approx(expected, abs=1e-9)


def test_the_mean_carries_the_gradient_to_each_piece():
    pieces = [torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)]
    gathered(pieces, [3, 1]).backward()
    assert [piece.grad.item() for piece in pieces] == [0.75, 0.25]


def test_a_piece_without_rows_does_not_count():
    assert gathered([torch.tensor(5.0), torch.tensor(1.0)], [2, 0]).item() == 5


@pytest.mark.parametrize("rows", [[], [0, 0]])
def test_scalars_of_a_model_that_takes_no_tensors_are_averaged_as_they_are(rows):
    assert gathered([torch.tensor(1.0), torch.tensor(3.0)], rows).item() == 2


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a: (a, a * 2),
        lambda a: [a, a * 2],
        lambda a: Pair(a, a * 2),
        lambda a: {"x": a, "y": a * 2},
        lambda a: OrderedDict(x=a, y=a * 2),
        lambda a: {"x": [a, (a, Pair(a, a))]},
        lambda a: [Pair({"z": a}, a)],
    ],
)
def test_structures_of_scalars_keep_their_kind(wrap):
    result = gathered([wrap(torch.tensor(1.0)), wrap(torch.tensor(5.0))], [1, 3])
    expected = wrap(torch.tensor(4.0))
    assert type(result) is type(expected)
    assert result == expected


def test_none_stays_none_and_other_tensors_go_to_pytorch(monkeypatch):
    seen = []
    parent = ReadThroughDP.__mro__[2]
    monkeypatch.setattr(
        parent, "gather", lambda self, outputs, device: seen.append(outputs) or torch.cat(outputs)
    )
    first = {"loss": torch.tensor(1.0), "scores": torch.ones(2, 3)}
    second = {"loss": torch.tensor(4.0), "scores": torch.zeros(1, 3)}
    result = gathered([first, second], [2, 1])
    assert result["loss"].item() == 2
    assert result["scores"].shape == (3, 3)
    assert len(seen) == 1
    monkeypatch.undo()
    assert gathered([{"loss": None}, {"loss": None}], [1, 1]) == {"loss": None}


def test_outputs_that_do_not_match_raise():
    with pytest.raises(ValueError, match="zip"):
        gathered([(torch.tensor(1.0),), (torch.tensor(1.0), torch.tensor(2.0))], [1, 1])
    with pytest.raises(KeyError):
        gathered([{"a": torch.tensor(1.0)}, {"b": torch.tensor(1.0)}], [1, 1])


@pytest.mark.parametrize(
    ("values", "dim", "rows"),
    [
        ([torch.ones(3, 2)], 0, 3),
        ([torch.ones(3, 2)], 1, 2),
        ([torch.ones(3)], 1, 1),
        (["text", 5, torch.ones(4)], 0, 4),
        ([{"a": {"b": torch.ones(5)}}], 0, 5),
        ([{}, [], [(torch.ones(6),)]], 0, 6),
        ([torch.ones(0, 2), torch.ones(3)], 0, 0),
        ([], 0, 0),
        ([None, 1], 0, 0),
    ],
)
def test_rows_are_those_of_the_first_tensor(values, dim, rows):
    assert _rows(values, dim) == rows
