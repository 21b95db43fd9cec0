"""`wrap_model`: what every strategy returns, what is trained, and which ranks may not differ.

What is refused, and in which words: `tests/promises/misuse_models.py`.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from common_models import batch, seeded, smooth
from logged import log_of
from on_ranks import caught, run, run_caught
from sharding import whole
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pardata import Microbatches, backward, check_in_sync, fingerprint, unwrap, world, wrap_model
from pardata.strategies._wrap_model import strategy_of


class Elsewhere(nn.Parameter):
    """Says that it is on a GPU, of which there need be none."""

    device = property(lambda _: torch.device("cuda", 1))


def wrapped_elsewhere(strategy, bound):
    net = nn.Linear(2, 2)
    net.bias = Elsewhere(net.bias.detach())
    dist.group.WORLD.bound_device_id = bound
    try:
        return caught(wrap_model, net, strategy)
    finally:
        dist.group.WORLD.bound_device_id = None


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "exact"])
def test_a_model_on_several_devices_raises_where_unsupported(strategy):
    text = (
        "`model` must be on one device under strategy {!r}{}, but is spread over cpu, cuda:1: move "
        "it to one, or use 'ddp' in a group without device_id"
    )
    (raised,) = run(wrapped_elsewhere, strategy, torch.device("cuda", 0), world_size=1)
    assert str(raised) == f"ValueError: {text.format(strategy, BOUND)}"
    (raised,) = run(wrapped_elsewhere, strategy, None, world_size=1)
    # DDP goes on, to PyTorch's own refusal of a GPU that is not there.
    assert (raised.text == text.format(strategy, "")) == (strategy != "ddp")


BOUND = ", in a process group bound to cuda:0"


# What comes back


@pytest.mark.parametrize("strategy", ["auto", "none"])
@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.ReLU(), nn.LazyLinear(2), nn.Linear(1, 1).requires_grad_(False)]
)
def test_wrap_model_returns_the_module_itself_in_one_process(model, strategy):
    assert wrap_model(model, strategy) is model
    assert wrap_model(model, strategy, find_unused_parameters=True, sync_batchnorm=True) is model


def test_the_bare_module_is_moved():
    assert next(wrap_model(nn.Linear(2, 2), "none", device="meta").parameters()).is_meta


def kinds():
    found = {}
    for strategy in ("auto", "ddp", "fsdp", "exact"):
        net = seeded()
        model = wrap_model(net, strategy)
        is_ddp = isinstance(model, DistributedDataParallel)
        shape = tuple(model(batch(8)).shape)
        found[strategy] = strategy_of(model).name, is_ddp, unwrap(model) is net, shape
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_each_strategy_returns_a_model_of_its_kind(size):
    in_ddp = {"ddp": True, "fsdp": False, "exact": size > 1}
    expected = {name: (name, is_ddp, True, (8, 3)) for name, is_ddp in in_ddp.items()}
    expected["auto"] = ("ddp" if size > 1 else "none", size > 1, True, (8, 3))
    assert run(kinds, world_size=size) == [expected] * size


def test_dp_on_a_cpu_runs():
    net, rows = seeded(smooth), batch()
    expected = net(rows)
    first, second = wrap_model(net, "dp"), wrap_model(seeded(), "dp", device_ids=[0, 1])
    assert isinstance(first, DataParallel)
    assert type(first) is not DataParallel
    assert torch.equal(first(rows), expected)
    assert second(rows).shape == (12, 3)


def warned():
    with log_of() as log:
        for _ in range(2):
            wrap_model(seeded(), "none")
    return log.lines


def test_none_in_a_larger_world_warns_on_rank_0():
    text = "[0/2] under strategy 'none' each of the 2 ranks trains a model of its own"
    assert run(warned, world_size=2) == [[text], []]


# What is trained


def started(strategy):
    return fingerprint(wrap_model(seeded(seed=dist.get_rank()), strategy))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_seeded_differently_start_from_rank_0(strategy):
    assert run(started, strategy, world_size=3) == [fingerprint(seeded(seed=0))] * 3


def trained_by_an_optimizer(made_before):
    net, early = seeded(smooth), []
    leftover = list(net.parameters())  # by itself no mistake
    if made_before:
        optimizer = torch.optim.SGD(leftover, lr=0.1)
        optimizer.itself = optimizer  # as with a scheduler: nobody has it, and it is not gone yet
        wrap_model(seeded(), "fsdp")  # from here on each optimizer is looked at
        optimizer.step()
    model = wrap_model(net, "fsdp")
    if made_before:
        model(batch()).sum().backward()
        early = [caught(optimizer.step) for _ in range(2)]
        model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = fingerprint(model)
    model(batch()).sum().backward()
    optimizer.step()
    return early, fingerprint(model) != before


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_made_before_sharding_raises_at_each_step(size):
    for early, is_trained in run(trained_by_an_optimizer, True, world_size=size):
        first, second = map(str, early)
        assert (first, is_trained) == (second, True)
        assert first == ("RuntimeError: SGD has 4 parameters from before wrap_model: make it after")
    assert run(trained_by_an_optimizer, False, world_size=size) == [([], True)] * size


def trained_by_an_optimizer_made_after_an_evaluation(compiled):
    model = wrap_model(seeded(smooth), "fsdp", reshard_after_forward=False)
    runs = torch.compile(model, backend="eager") if compiled else model
    with torch.no_grad():
        runs(batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = fingerprint(model)
    runs(batch()).sum().backward()
    optimizer.step()
    return fingerprint(model) != before


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_an_optimizer_made_after_an_evaluation_trains_what_is_sharded(size, compiled):
    trained = run(trained_by_an_optimizer_made_after_an_evaluation, compiled, world_size=size)
    assert trained == [True] * size


# What is frozen, or not, after wrapping


def parts_frozen(strategy, at_first, later, **options):
    """Return how a step by `backward` and a bare one end after a part was frozen or not."""
    found = []
    for is_bare in (False, True):
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        net[0].requires_grad_(not at_first)
        model = wrap_model(net, strategy, **options)
        net[0].requires_grad_(not later)

        def step(model=model, is_bare=is_bare):
            model.zero_grad()
            if is_bare:
                model(batch(seed=dist.get_rank())).sum().backward()
            else:
                backward(model, lambda m, x: m(x).sum(), batch(seed=dist.get_rank()))

        found.append(caught(step))
        if found[-1] is None:
            found[-1] = net[0].weight.grad is not None
            continue
        model = wrap_model(unwrap(model), strategy)  # the cure
        step(model)
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        sums = [gradient.clone() for gradient in gradients]
        for each in sums:
            dist.all_reduce(each)
        mean = zip(sums, gradients, strict=True)
        assert all(torch.allclose(a / dist.get_world_size(), b) for a, b in mean)
        assert (net[0].weight.grad is None) == later
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("later", [False, True])
def test_a_part_unfrozen_or_frozen_after_wrapping_is_refused_under_ddp(later, size):
    for found in run(parts_frozen, "ddp", not later, later, world_size=size):
        for raised in found:
            assert str(raised) == (
                "RuntimeError: under 'ddp' a parameter must be frozen, or not, as when wrapped, "
                "but `0.weight` is not: wrap again, model = wrap_model(unwrap(model)), or wrap "
                "with find_unused_parameters=True and freeze it then"
            )


def froze_with_option():
    return parts_frozen("ddp", False, True, find_unused_parameters=True)


def test_find_unused_parameters_allows_freezing_after_wrapping():
    assert run(froze_with_option, world_size=2) == [[False, False]] * 2


def unfrozen_by_backward(strategy):
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    net[0].requires_grad_(False)
    model, parts = wrap_model(net, strategy), [(batch(seed=n),) for n in range(3)]
    own = parts[:2] if world().is_main else parts[2:]
    steps = Microbatches(
        own,
        epoch=0,
        step=0,
        first=0 if world().is_main else 2,
        counts=[len(x) for (x,) in parts],
        size=2,
    )
    plain = copy.deepcopy(net) if strategy == "exact" else None
    net[0].requires_grad_(True)
    backward(model, lambda m, x: m(x[0]).square().mean(), steps)
    check_in_sync(model)
    if plain is not None:
        plain.requires_grad_(True)
        plain(torch.cat([x for (x,) in parts])).square().mean().backward()
        torch.testing.assert_close(plain[0].weight.grad, net[0].weight.grad)
    return whole(net[0].weight.grad).tolist()


@pytest.mark.parametrize("strategy", ["exact", "fsdp"])
def test_a_part_may_be_unfrozen_after_wrapping_under_the_others(strategy):
    first, second = run(unfrozen_by_backward, strategy, world_size=2)
    assert first == second


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("strategy", ["exact", "ddp"])
def test_an_embedding_that_writes_into_its_rows_is_refused(strategy, kind):
    net = nn.Sequential(kind(4, 2, max_norm=0.5))
    for raised in run_caught(wrap_model, net, strategy, world_size=2):
        assert str(raised).endswith(
            f"ValueError: `0` must not have `max_norm` under '{strategy}': after each step call "
            "weight.data.renorm_(2, 0, 0.5) instead"
        )
    assert wrap_model(net) is net  # a single process
