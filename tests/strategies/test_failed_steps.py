"""A step that ends in an error leaves no trace: who catches it and goes on trains right."""

import copy

import pytest
import torch
from common_gradients import cut, gradients, pieces, squared_error
from on_ranks import caught, run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from pardata import backward, check_in_sync, unwrap, world, wrap_model

ALONE = ["none", "dp"]


def normed():
    torch.manual_seed(0)
    parts = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 3)]
    return nn.Sequential(*parts).double()


def batch_of(number, seed):
    """Return the share of a step of so many microbatches for each rank; of one: a plain batch."""
    if number == 0:
        return pieces((3,), seed + world().rank)[0]
    return cut(pieces((3,) * (number * world().size), seed))


class Failing:
    """Fails in the forward or the backward of the last microbatch."""

    def __init__(self, where, batch, kind):
        self.where, self.kind = where, kind
        self.left = len(batch) if hasattr(batch, "counts") else 1

    def __call__(self, model, batch):
        self.left -= 1
        if self.left == 0 and self.where == "before the forward":
            raise self.kind
        loss = squared_error(model, batch)
        if self.left == 0 and self.where == "after the forward":
            raise self.kind
        if self.left == 0:
            part = unwrap(model)[2]
            handle = part.register_full_backward_hook(lambda *_: self.fail(handle))
            loss = squared_error(model, batch)
        return loss

    def fail(self, handle):
        handle.remove()
        raise self.kind


def state(model):
    return [None if g is None else g.clone() for g in gradients(model)]


def is_same(one, other):
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def after_errors(strategy, number, where, kind):
    """Train with and without steps that fail; return what they left, and how far the two are."""
    net = normed()
    models = [wrap_model(copy.deepcopy(net), strategy) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    found = []
    for step in range(6):
        batch = batch_of(number, step)
        if step in (1, 2, 4):
            before = state(models[0])
            raised = caught(backward, models[0], Failing(where, batch, kind), batch)
            found.append((raised.type, is_same(before, state(models[0]))))
        for model, optimizer in zip(models, optimizers, strict=True):
            if step != 3:  # then it accumulates
                optimizer.zero_grad()
            backward(model, squared_error, batch)
        pairs = zip(*map(gradients, models), strict=True)
        found.append(all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs))
        for optimizer in optimizers:
            optimizer.step()
    for model in models if strategy != "none" else ():
        check_in_sync(model)
    return found


def wanted(kind):
    failed = (kind, True)
    return [True, failed, True, failed, True, True, failed, True, True]


def check(strategy, number, where, size, kind=ValueError):
    found = run(after_errors, strategy, number, where, kind, world_size=size)
    assert found == [wanted(kind.__name__)] * size


PLACES = ["before the forward", "after the forward", "in the backward"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("strategy", ALONE)
def test_in_one_process_gradients_are_as_they_were(strategy, number, where):
    assert after_errors(strategy, number, where, ValueError) == wanted("ValueError")


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_several_ranks_the_next_steps_are_right(strategy, where):
    for number, size in ((0, 1), (0, 2), (2, 2)):
        check(strategy, number, where, size)


class Broken(torch.autograd.Function):
    """Fails in the backward, as one for which the memory is not enough."""

    @staticmethod
    def forward(_ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(_ctx, _gradient):
        raise ValueError


def after_unequal_errors(strategy, parts):
    """Return what steps find after one that fails on all ranks, which run unequally many."""
    models, found = [wrap_model(normed(), strategy.removesuffix(", a hook")) for _ in range(2)], []
    for model in models if strategy.endswith("a hook") else ():
        model.register_comm_hook(None, allreduce_hook)  # so the loss is sent by itself
    for step in range(4):
        batch = cut(pieces((3,) * parts, step))
        if step % 2 == 1:
            raised = caught(
                backward, models[0], lambda m, b: Broken.apply(squared_error(m, b)), batch
            )
            found.append(raised.type)
        for model in models:
            backward(model, squared_error, batch)
        pairs = zip(*map(gradients, models), strict=True)
        found.append(all(torch.equal(a, b) for a, b in pairs))
    check_in_sync(models[0])
    return found


@pytest.mark.parametrize("strategy", ["ddp", "ddp, a hook", "fsdp", "exact"])
def test_an_error_on_all_ranks_keeps_placeholder_ranks_in_step(strategy):
    found = run(after_unequal_errors, strategy, 3, world_size=2)
    assert found == [[True, "ValueError", True, True, "ValueError", True]] * 2


def after_errors_apart(strategy, number, failing, shift):
    """Return what steps find if one fails on all ranks, on each in another place."""
    places = PLACES[1:] if strategy == "fsdp" else PLACES  # its forward is collective
    where = places[(world().rank + shift) % len(places)]
    models, found = [wrap_model(normed(), strategy) for _ in range(2)], []

    def fails(model, batch):
        if where == "before the forward":
            raise ValueError
        loss = squared_error(model, batch)
        if where == "after the forward":
            raise ValueError
        return Broken.apply(loss)

    for step in range(3):
        batch = batch_of(number, step)
        if step == failing:
            found.append(caught(backward, models[0], fails, batch).type)
        losses = [backward(model, squared_error, batch) for model in models]
        pairs = zip(*map(gradients, models), strict=True)
        found.append(all(torch.allclose(a, b) for a, b in [*pairs, losses]))
    return found


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "exact"])
def test_ranks_that_fail_in_other_places_stay_in_step(strategy, failing):
    for number in (1, 2) if strategy == "exact" else (0, 2):
        for size, shift in ((2, 0), (2, 1), (3, 0)):
            args = strategy, number, failing, shift
            for found in run(after_errors_apart, *args, world_size=size, timeout=30):
                assert found == [*[True] * failing, "ValueError", *[True] * (3 - failing)]


@pytest.mark.parametrize("where", PLACES)
def test_under_exact_too(where):
    check("exact", 2, where, 2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "exact"])
def test_whatever_kind_of_error_it_is(strategy):
    # Of a KeyboardInterrupt under "exact" the other ranks hear nothing.
    check(strategy, 2, "after the forward", 1 if strategy == "exact" else 2, KeyboardInterrupt)


def buffers_after(kind):
    model, batch = wrap_model(normed(), "exact"), batch_of(2, 0)
    before = [buffer.clone() for buffer in unwrap(model).buffers()]
    raised = caught(backward, model, Failing("after the forward", batch, kind), batch)
    return raised.type, all(map(torch.equal, before, unwrap(model).buffers()))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_under_exact_buffers_are_as_they_were(kind):
    size = 1 if kind is KeyboardInterrupt else 2
    assert run(buffers_after, kind, world_size=size) == [(kind.__name__, True)] * size


def broken(*_):
    raise RuntimeError("a device-side assert")


def type_where_kernels_fail(strategy):
    """Return the type of an error after which each kernel fails, as on a GPU."""
    model, batch = wrap_model(normed(), strategy), cut(pieces((3,), 0))
    with pytest.MonkeyPatch.context() as patch:

        def fail(*_):
            patch.setattr(torch.Tensor, "copy_", broken)
            patch.setattr(torch, "_foreach_copy_", broken)
            raise ValueError

        return caught(backward, model, fail, batch).type


@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_a_clean_up_that_fails_too_leaves_the_error_of_the_step(strategy):
    assert run(type_where_kernels_fail, strategy) == ["ValueError"] * 2  # one runs a placeholder


# --- gradients that are kept by reference ---


def kept():
    """Return whether the gradients of one task stay what they are while another is run."""
    model, found = wrap_model(normed(), "auto"), []
    for seed in range(3):
        model.zero_grad()
        backward(model, squared_error, batch_of(2, seed))
        first = [parameter.grad for parameter in model.parameters()]
        copies = [gradient.clone() for gradient in first]
        model.zero_grad()
        backward(model, squared_error, batch_of(2, seed + 10))
        found.append(all(map(torch.equal, first, copies)))
    backward(model, squared_error, batch_of(2, 3))
    held = [parameter.grad for parameter in model.parameters()]
    backward(model, squared_error, batch_of(2, 4))
    return [*found, all(a is p.grad for a, p in zip(held, model.parameters(), strict=True))]


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_that_are_kept_by_reference_stay_what_they_are(size):
    assert run(kept, world_size=size) == [[True] * 4] * size


def train_by_hand_after_an_error():
    here, net = world(), normed()
    model = wrap_model(net, "fsdp")
    batch = batch_of(2, 0)
    caught(backward, model, Failing("before the forward", batch[:1], ValueError), batch)
    model.eval()  # batch norm of each rank's own samples would differ
    rows = torch.arange(4.0 * here.size).view(-1, 4).double()
    model(rows[here.rank :: here.size]).square().mean().backward()
    alone = normed().eval()
    alone(rows).square().mean().backward()
    whole = [p.grad for p in alone.parameters()]
    return [torch.allclose(a, b) for a, b in zip(gradients(model), whole, strict=True)]


def test_a_plain_backward_after_an_early_error_is_synchronised():
    for found in run(train_by_hand_after_an_error, world_size=2):
        assert all(found)
