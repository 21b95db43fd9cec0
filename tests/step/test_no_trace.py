"""A step that ends in an error leaves no trace: who catches it and goes on trains right."""

import copy

import pytest
import torch
from gradient_zoo import cut, gradients, pieces, squared_error
from on_ranks import Raised, caught, run
from sharding import TOGETHER, needs_fsdp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pardata import backward, check_in_sync, unwrap, world, wrap_model
from pardata.model import _sharding

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
    buffers = [buffer.clone() for buffer in unwrap(model).buffers()]
    return [None if g is None else g.clone() for g in gradients(model)], buffers


def is_same(one, other):
    return all(
        (a is None and b is None) or torch.equal(a, b)
        for a, b in zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True)
    )


def after_errors(strategy, number, where, kind, options):
    """Train with and without steps that fail; return what they left, and how far the two are."""
    net = normed()
    models = [wrap_model(copy.deepcopy(net), strategy, **options) for _ in range(2)]
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


def check(strategy, number, where, size, kind=ValueError, **options):
    failed = (kind.__name__, True)
    wanted = [True, failed, True, failed, True, True, failed, True, True]
    args = (strategy, number, where, kind, options)
    assert run(after_errors, *args, world_size=size) == [wanted] * size


PLACES = ["before the forward", "after the forward", "in the backward"]


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("strategy", ALONE)
def test_in_one_process_gradients_and_buffers_are_as_they_were(strategy, number, where):
    failed = ("ValueError", True)
    wanted = [True, failed, True, failed, True, True, failed, True, True]
    assert after_errors(strategy, number, where, ValueError, {}) == wanted


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("strategy", TOGETHER)
def test_on_several_ranks_the_next_steps_are_right(strategy, size, where):
    for number in (0, 2):
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
    models, found = [wrap_model(normed(), strategy) for _ in range(2)], []
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


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("strategy", [*TOGETHER, "exact"])
def test_an_error_of_all_ranks_leaves_them_in_step_if_some_run_a_placeholder(strategy, size):
    found = run(after_unequal_errors, strategy, size + 1, world_size=size)
    assert found == [[True, "ValueError", True, True, "ValueError", True]] * size


@pytest.mark.parametrize("where", PLACES)
def test_under_exact_too(where):
    check("exact", 2, where, 2)


@pytest.mark.parametrize("strategy", [*TOGETHER, "exact"])
def test_whatever_kind_of_error_it_is(strategy):
    # Of a KeyboardInterrupt under "exact" the other ranks hear nothing.
    check(strategy, 2, "after the forward", 1 if strategy == "exact" else 2, KeyboardInterrupt)


@pytest.mark.parametrize(
    "options", [{"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]
)
def test_with_options_of_ddp(options):
    check("ddp", 2, "in the backward", 2, **options)


def of_an_older_torch():
    from torch.distributed.fsdp import FSDPModule

    own = FSDPModule.__dict__.get("reset_iter_state")
    if own is not None:
        del FSDPModule.reset_iter_state
    try:
        return [
            after_errors("fsdp", number, where, ValueError, {})
            for where in PLACES
            for number in (0, 2)
        ]
    finally:
        if own is not None:
            FSDPModule.reset_iter_state = own


class Table(nn.Module):
    """Has a buffer too large to be copied at each step, and may write to it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("table", torch.zeros(2**17))
        self.writes = self.fails = False

    def forward(self, x):
        if self.writes:
            self.table += 1
        if self.fails:
            raise KeyboardInterrupt
        return (self.weight * x).sum()


class Copied(TorchDispatchMode):
    """Counts the numbers that are copied from tensor to tensor."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._foreach_copy_.default:
            self.numbers += sum(tensor.numel() for tensor in args[0])
        return func(*args, **kwargs or {})


def test_a_large_buffer_is_copied_only_if_steps_change_it():
    model = wrap_model(Table(), "none")

    def step():
        with Copied() as copied:
            found = caught(backward, model, lambda model, x: model(x), torch.ones(2))
        return isinstance(found, Raised), copied.numbers, model.table[0].item()

    assert [step() for _ in range(2)] == [(False, 0, 0.0)] * 2
    model.writes = True
    assert step() == (False, 0, 1.0)  # its first change
    model.fails = True
    assert step() == (True, 2 * 2**17, 1.0)  # kept, and put back


@pytest.mark.skipif("fsdp" not in TOGETHER, reason="fully_shard of this torch needs a GPU")
def test_under_fsdp_also_where_torch_has_no_reset():
    assert callable(_sharding.forget_step)
    failed = ("ValueError", True)
    wanted = [True, failed, True, failed, True, True, failed, True, True]
    assert run(of_an_older_torch, world_size=2) == [[wanted] * 6] * 2


def test_what_was_put_into_a_model_after_its_first_steps_is_seen():
    net = normed()
    batch = batch_of(0, 0)
    for _ in range(2):
        backward(net, squared_error, batch)
    net[2] = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double()
    net[1].running_mean = torch.ones(6).double()
    for accumulates in (False, True):
        if accumulates:
            backward(net, squared_error, batch)
        before = state(net)
        assert caught(backward, net, Failing("in the backward", batch, ValueError), batch).type
        assert is_same(before, state(net))


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


@needs_fsdp
def test_a_backward_by_hand_after_an_error_before_the_last_microbatch_is_synchronised():
    for found in run(train_by_hand_after_an_error, world_size=2):
        assert all(found)
