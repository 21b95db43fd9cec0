"""The wrappers read, write and load through to their module, and keep buffers equal."""

import contextlib
import copy
import io
import logging
import pickle
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from common_models import Net as Plain
from common_models import batch, seeded, wrapped_as
from hypothesis import given
from hypothesis import strategies as st
from logged import log_of
from on_ranks import caught, run, run_caught
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from pardata import check_in_sync, fingerprint, load_weights, unwrap, wrap_model

Pair = namedtuple("Pair", "loss scores")  # noqa: PYI024  # the plain kind is what is tested


class Net(Plain):
    """What real models have beside layers: settings, state, properties and methods."""

    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss()
        self.register_buffer("mask", torch.ones(8))
        self.verbose = False
        self.seen = []
        self.device = "its own"  # DDP and DataParallel have attributes of this name or like it
        self._hidden = "inside"

    def forward(self, rows):
        self.seen.append((len(rows), self.verbose))
        return self.last(torch.relu(self.norm(self.module(rows))) * self.mask)

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

    def fails(self):
        raise KeyError(self)


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, rows):
        return self.line(rows)


def wrapped(strategy="ddp", kind=Net, **options):
    return wrapped_as(strategy, seeded(kind), **options)


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def same(tensor):
    mean = tensor.clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / dist.get_world_size(), tensor)


# What asserts by itself, under the wrappers that a CPU has


def attributes_are_read_through(strategy):
    model = wrapped(strategy)
    net = unwrap(model)
    assert (model.norm, model.mask, model.verbose) == (net.norm, net.mask, False)
    assert (model.width, model._hidden, model.get_submodule("norm")) == (3, "inside", net.norm)
    assert getattr(model, "nothing", "default") == "default"
    assert not hasattr(model, "broken")
    names = {"verbose", "width", "predict", "norm", "mask", "module", "state_dict"}
    assert names <= set(dir(model))
    assert dir(model) == sorted(set(dir(model)))
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        _ = model.nothing


def attributes_set_and_deleted_are_those_of_the_model(strategy):
    """The article's bug: an attribute set on the wrapper was not seen inside the model."""
    model = wrapped(strategy)
    net = unwrap(model)
    model.verbose = True
    model(batch())
    assert net.seen == [(12, True)]
    assert "verbose" not in vars(model)
    model.new = 3
    assert (net.new, model.new) == (3, 3)
    del model.new
    assert not hasattr(net, "new")
    with pytest.raises(AttributeError, match="new"):
        del model.new
    model.mask = torch.zeros(8)
    assert net.mask.sum() == 0
    assert torch.equal(model(batch()), net.last.bias.expand(12, 3))


def names_with_an_underscore_and_of_the_wrapper_stay_on_the_wrapper(strategy):
    model = wrapped(strategy)
    net = unwrap(model)
    model._hidden = "outside"
    assert (net._hidden, model._hidden) == ("inside", "outside")
    del model._hidden
    assert model._hidden == "inside"
    model.device_ids = []  # DDP's and DataParallel's
    assert model.device_ids == []
    assert not hasattr(net, "device_ids")
    for mode in (False, True):
        model.train(mode)
        assert (model.training, net.training) == (mode, mode)


ASSIGNMENTS = [  # the whole text: tests/promises/errors.md
    lambda model: setattr(model, "last", nn.Linear(8, 3)),
    lambda model: setattr(model, "module", nn.Linear(8, 3)),
    lambda model: setattr(model, "scale", nn.Parameter(torch.ones(1))),
    lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(1))),
    lambda model: model.register_parameter("scale", None),
    lambda model: model.add_module("head", nn.Linear(1, 1)),
    lambda model: model.register_module("head", nn.Linear(1, 1)),
]


def what_would_train_without_being_synchronised_cannot_be_assigned(strategy):
    model = wrapped(strategy)
    before = list(unwrap(model).state_dict())
    for assign in ASSIGNMENTS:
        with pytest.raises(TypeError, match=r"`\w+` must be set before wrap_model, but a "):
            assign(model)
    assert list(unwrap(model).state_dict()) == before


def a_buffer_registered_through_the_wrapper_is_the_models_and_kept_equal(strategy):
    model = wrapped(strategy, kind=Line)
    model.register_buffer("count", torch.zeros(1) + rank())
    model.register_buffer("passing", torch.zeros(1), persistent=False)
    assert list(unwrap(model).state_dict()) == ["count", "line.weight", "line.bias"]
    model(batch()).sum().backward()
    check_in_sync(model)


def a_state_dict_has_the_names_of_the_module_and_loads_into_it(strategy):
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


class Inner(nn.Module):
    """A model that has a child called `module`, twice, and a weight at each level."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.module.module = nn.Linear(4, 3)
        self.module.norm = nn.BatchNorm1d(3)
        self.weight = nn.Parameter(torch.ones(3))


def a_wrapped_child_saves_and_loads_like_the_bare_one(strategy):
    for kind in (Net, Inner):
        loads_as_a_child(strategy, kind)


def loads_as_a_child(strategy, kind):
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
    deeper = {f"module.0.{name}": value for name, value in state.items()}
    if kind is Inner:  # without `module` its names are not told apart
        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "module\.0\.1'):
            load_weights(model, deeper)
    else:
        load_weights(model, deeper)
        assert fingerprint(model[0]) == expected


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copies_and_pickles_work_and_train_in_step(strategy):
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
        again.zero_grad()
        for step in range(2):
            again(batch(seed=10 * step + rank())).sum().backward()
            check_in_sync(again)
        if dist.is_initialized():
            same(again.last.weight.grad)
        assert fingerprint(again) != fingerprint(model)  # batch norm went on, in the copy alone


OF_BOTH = [
    attributes_are_read_through,
    attributes_set_and_deleted_are_those_of_the_model,
    names_with_an_underscore_and_of_the_wrapper_stay_on_the_wrapper,
    what_would_train_without_being_synchronised_cannot_be_assigned,
    a_buffer_registered_through_the_wrapper_is_the_models_and_kept_equal,
    a_state_dict_has_the_names_of_the_module_and_loads_into_it,
    a_wrapped_child_saves_and_loads_like_the_bare_one,
    copies_and_pickles_work_and_train_in_step,
]


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
@pytest.mark.parametrize("holds", OF_BOTH, ids=lambda holds: holds.__name__)
def test_of_both_wrappers(holds, strategy):
    if strategy == "dp":
        holds("dp")
    else:
        run(holds, "ddp", world_size=2)


# Names that a wrapper hides


class Hiding(nn.Linear):
    def __init__(self):
        super().__init__(1, 1)
        self.device_ids = [7]

    def gather(self):
        return self


class Alike(nn.Linear):
    """Its `device` is what that of DDP is."""

    def __init__(self):
        super().__init__(1, 1)

    @property
    def device(self):
        return self.weight.device


def hidden(strategy, *kinds):
    with log_of("pardata", logging.WARNING) as log:
        for kind in kinds:
            model = wrapped(strategy, kind=kind)
    return getattr(model, "device", "") == "its own", [
        line for line in log.lines if "hides" in line
    ]


HIDDEN = [
    ((Line, Alike, Net, Net), "[0/2] TransparentDDP", ["`device` of Net", "`module` of Net"]),
    ((Hiding,) * 2, "TransparentDP", ["`device_ids` of Hiding", "`gather` of Hiding"]),
]


@pytest.mark.parametrize(("kinds", "by", "names"), HIDDEN)
def test_hidden_attribute_names_are_logged_once_on_rank_0(kinds, by, names):
    strategy, size = ("ddp", 2) if "DDP" in by else ("dp", 1)
    first, *others = run(hidden, strategy, *kinds, world_size=size)
    text = "{} hides {}: read unwrap(model).{}"
    lines = [text.format(by, name, name.split("`")[1]) for name in names]
    assert first == (False, lines)
    assert others == [(False, [])] * (size - 1)


# Methods


def guards():
    for inside in (False, True):
        net = seeded(Net)
        model = wrap_model(torch.compile(net, backend="eager") if inside else net, "ddp")
        rows, targets = batch(), torch.zeros(12, dtype=torch.int64)
        text = "`training_step` must not run Net with gradients outside of the model's forward"
        with pytest.raises(RuntimeError, match=text):  # the whole text: tests/promises/errors.md
            model.training_step(rows, targets)
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert model.training_step(rows, targets) > 0
        assert model.predict(rows).shape == (12,)
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


def test_dp_has_nothing_to_guard():
    model = wrapped("dp")
    model.training_step(batch(), torch.zeros(12, dtype=torch.int64)).backward()
    assert model.last.weight.grad is not None


# Buffers


# A property since there is a new name.
HAS_NEW_NAME = hasattr(DistributedDataParallel, "broadcast_buffers")
FLAG = "forward_sync_buffers" if HAS_NEW_NAME else "broadcast_buffers"


def rank_0_apart():
    found = []
    for flag in (True, False):
        net = seeded(Net)
        net.mask.fill_(rank())
        model = wrap_model(net, "ddp", **{FLAG: flag})
        found.append(net.mask[0].item())
        net.mask.fill_(rank())
        model(batch()).sum().backward()
        found.append(net.mask[0].item())
    return found


def test_buffers_start_equal_and_stay_apart_only_where_asked():
    assert run(rank_0_apart, world_size=2) == [[0, 0, 0, after] for after in (0, 1)]


def modes():
    model = wrapped()
    net, told = unwrap(model), {}
    for how, outside, inside, context in (
        ("in training", True, True, contextlib.nullcontext),
        ("without gradients", True, True, torch.no_grad),
        ("without sync", True, True, model.no_sync),
        ("evaluated inside", True, False, contextlib.nullcontext),
        ("trained inside", False, True, contextlib.nullcontext),
    ):
        model.train(outside)
        net.train(inside)
        net.mask.fill_(1 + rank())
        with context():
            output = model(batch())
        assert not is_equal(net.mask[:1])  # a rank may run a forward alone
        if output.requires_grad:
            output.sum().backward()
        told[how] = is_equal(net.mask[:1])
    return [how for how in told if told[how]]


def is_equal(number):
    both = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(both, number)
    return bool(both[0] == both[1])


def test_buffers_are_broadcast_only_in_synchronised_training_backwards():
    assert run(modes, world_size=2) == [["in training", "trained inside"]] * 2


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
    assert model.calls == 3


def test_buffers_that_autograd_saved_and_buffers_that_were_replaced_are_fine():
    run(masks, world_size=2)


def lonely():
    model = wrapped()
    for step in range(2):  # the second forward rebuilds DDP's buckets, once
        model(batch(seed=step)).sum().backward()
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for mode in (True, False):
            for alone in (0, 1):
                if rank() == alone:
                    model.train(mode)
                    with context():
                        model(batch())
                    model.state_dict()
                    model.train()
                dist.barrier()
    model(batch(seed=rank())).sum().backward()
    same(model.last.weight.grad)
    check_in_sync(model)


def test_a_rank_may_run_a_forward_alone_with_gradients_or_without():
    run(lonely, world_size=2, timeout=60)


# Uneven inputs


def joins(how):
    model = wrapped()
    with Join([model]) if how == "Join" else model.join():
        model(batch()).sum().backward()


@pytest.mark.parametrize("how", ["join", "Join"])
def test_join_is_refused(how):
    for raised in run_caught(joins, how, world_size=2):
        assert raised.text == (
            "`join()` must not be used after wrap_model: make_loader gives all ranks as many steps"
        )


# Unused parameters


class Spare(nn.Module):
    """The unused one stands in the middle, behind a frozen one."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)
        self.end = nn.Linear(4, 1)

    def forward(self, rows):
        return self.end(self.used(self.frozen(rows)))


def unused(*, detail=False, freeze=False, **options):
    if detail:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    model = wrapped(kind=Spare, **options)
    model.used.requires_grad_(not freeze)
    for step in range(3):
        model(batch(seed=step)).sum().backward()
    return model.used.weight.grad is not None


def unused_in_many_ways():
    found = [caught(unused), caught(lambda: unused(freeze=True))]
    fine = [unused(find_unused_parameters=True), unused(static_graph=True)]
    failing = wrapped(kind=Line)
    unwrap(failing).forward = lambda rows: rows.reshape(5, 7)
    return found, fine, caught(failing, batch()), caught(lambda: unused(detail=True))


def test_unused_parameters_raise_unless_find_unused_parameters_is_set():
    for (first, frozen), fine, other, detail in run(unused_in_many_ways, fresh=True):
        assert fine == [True, True]
        assert "shape '[5, 7]' is invalid" in other.text
        for raised in (first, detail):
            assert raised.type == "RuntimeError"
            assert "Expected to have finished reduction in the prior iteration" in raised.text
        assert "but `used.weight` is not: wrap again" in frozen.text


# What dp makes of the outputs of several devices


def gathered(outputs, rows, dim=0):
    model = wrapped("dp")
    model._rows = rows
    vars(model)["dim"] = dim  # DataParallel sets it only where there are GPUs
    return model.gather(outputs, torch.device("cpu"))


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(-100, 100)), min_size=1, max_size=5))
def test_scalars_become_their_mean_weighted_by_rows_with_its_gradient(pieces):
    # Of a model that takes no tensors there are no rows: they are averaged as they are.
    rows = [number for number, _ in pieces]
    weights = rows if any(rows) else [1] * len(rows)
    scalars = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for _, value in pieces]
    result = gathered(scalars, rows)
    expected = sum(n * v for n, (_, v) in zip(weights, pieces, strict=True)) / sum(weights)
    assert result.shape == ()
    assert result.item() == pytest.approx(expected, abs=1e-9)
    result.backward()
    shares = [number / sum(weights) for number in weights]
    assert [scalar.grad.item() for scalar in scalars] == pytest.approx(shares)


STRUCTURES = [lambda a: (a, a * 2), lambda a: Pair(a, a * 2), lambda a: [a, (a, Pair(a, [a]))]]


@pytest.mark.parametrize("wrap", STRUCTURES)
def test_structures_of_scalars_keep_their_kind(wrap):
    result = gathered([wrap(torch.tensor(1.0)), wrap(torch.tensor(5.0))], [1, 3])
    expected = wrap(torch.tensor(4.0))
    assert type(result) is type(expected)
    assert result == expected
