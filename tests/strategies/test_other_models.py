"""Other models that `loss_fn` runs, and what a loss trains beside its own model."""

import copy
from functools import partial

import pytest
import torch
from common_gradients import cut, gradients, pieces
from on_ranks import caught, run, run_caught
from sharding import whole
from torch import nn

from pardata import backward, check_in_sync, fingerprint, unwrap, world, wrap_model

TEXT = (
    "RuntimeError: the loss must train only `model`, but also trains {}: freeze it "
    "(requires_grad_(False)), or wrap both as one"
)


ALONE = ["none", "dp"]


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


def pair(norm=nn.LayerNorm):
    torch.manual_seed(0)
    maker = Generator(nn.Linear(4, 6), norm(6), nn.Linear(6, 3)).double()
    return maker, Discriminator(nn.Linear(3, 6), norm(6), nn.Linear(6, 1)).double()


def step(parameter):
    parameter.data.sub_(parameter.grad)


def step_in_hooks(strategy, batch=None):
    net = wrap_model(nn.Linear(4, 1).double(), strategy)
    before = fingerprint(net)
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    batch = cut(pieces((2,) * world().size)) if batch is None else (batch,)
    backward(net, lambda model, rows: model(rows[0]).mean(), batch)
    check_in_sync(net)
    return fingerprint(net) != before


@pytest.mark.parametrize("size", [2, 3])
def test_a_post_accumulate_grad_hook_raises_on_every_rank(size):
    for error in run_caught(step_in_hooks, "ddp", world_size=size):
        assert str(error) == (
            "RuntimeError: `weight` must have no register_post_accumulate_grad_hook, which would "
            "see a part of the gradient, but has: step after backward"
        )


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp"])
def test_such_a_hook_may_step_where_it_sees_the_gradient_of_all(strategy):
    size = 2 if strategy == "fsdp" else 1
    assert run(step_in_hooks, strategy, world_size=size) == [True] * size


def in_hooks(strategy, number, act):
    """Run a step with hooks that act; return its loss or error, and if weights are the same."""
    net = wrap_model(nn.Linear(4, 3).double(), strategy)
    before = fingerprint(net)
    for parameter in net.parameters():
        if act is steps:
            optimizer = torch.optim.SGD([parameter], 0.1)
            parameter.register_post_accumulate_grad_hook(partial(act, optimizer))
        else:
            parameter.register_hook(act)
    batch = cut(pieces((3,) * number * world().size))
    raised = caught(backward, net, lambda m, b: m(b[0]).square().mean(), batch)
    return str(raised), fingerprint(net) == before


def steps(optimizer, _):
    optimizer.step()


def reads(gradient):
    gradient.square().sum()


CASES = [("none", 2), ("dp", 2), ("ddp", 1), ("ddp", 2), ("fsdp", 2), ("exact", 1), ("exact", 2)]


@pytest.mark.parametrize(("strategy", "number"), CASES)
def test_an_optimizer_that_steps_before_the_gradient_is_final_raises(strategy, number):
    sizes = (1,) if strategy in ALONE else (1, 2, 3) if strategy == "exact" else (2, 3)
    for size in sizes:
        for raised, is_same in run(in_hooks, strategy, number, steps, world_size=size):
            assert "must have no register_post_accumulate_grad_hook, which would see" in raised
            assert is_same


@pytest.mark.parametrize("strategy", ["none", "ddp", "exact"])
def test_hooks_that_read_gradients_work_with_microbatches(strategy):
    for size in (1,) if strategy == "none" else (1, 2):
        for raised, _ in run(in_hooks, strategy, 2, reads, world_size=size):
            assert raised.startswith("tensor(")


def with_no_loader():
    return step_in_hooks("fsdp", torch.ones(2, 4, dtype=torch.float64))


def test_fsdp_needs_a_loader_for_steps_in_hooks():
    for error in run_caught(with_no_loader, world_size=2):
        assert "must have no register_post_accumulate_grad_hook" in error.text


def unfrozen(strategy, since):
    """Unfreeze a trunk outside of the model; return the step that raises, and how."""
    trunk = nn.Linear(4, 4).double().requires_grad_(False)
    head = wrap_model(nn.Linear(4, 1).double(), strategy)
    for step in range(1, 65):
        trunk.requires_grad_(step > since)
        batch = cut(pieces((2,) * 3, step))
        raised = caught(backward, head, lambda m, b: m(trunk(b[0])).square().mean(), batch)
        if not isinstance(raised, torch.Tensor):
            return step, str(raised)
    return None


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "exact"])
def test_what_is_unfrozen_later_is_found_when_weights_are_compared(strategy):
    for size, since, found in ((2, 2, 4), (3, 0, 1), (2, 40, 64)):
        for step, raised in run(unfrozen, strategy, since, world_size=size):
            assert step == found
            assert raised.startswith(TEXT.partition("{")[0])


def of_judge(maker, how):
    def loss(judge, batch):
        if how == "no_grad":
            with torch.no_grad():
                fake = maker(batch[0])
        else:
            fake = maker(batch[0]).detach()
        return (judge(fake) - judge(batch[1])).square().mean()

    return loss


def of_maker(judge):
    return lambda maker, batch: judge(maker(batch[0])).square().mean()


def wrapped(net, strategy):
    """Wrap a net; in "blocks" it is sharded one part after the other."""
    if strategy != "blocks":
        return wrap_model(net, strategy)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for part in (net[0], net[2]):
        fully_shard(part, mesh=init_device_mesh("cpu", (world().size,)))
    return wrap_model(net, "fsdp")


def trained(strategy, parts, how):
    """Train a generator and its discriminator against each other; return losses and weights."""
    models = [wrapped(net, strategy) for net in pair()]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    (maker, judge), losses = models, []
    for step in range(3):
        batch = cut(pieces(parts, step))
        optimizers[1].zero_grad()
        losses.append(backward(judge, of_judge(maker, how), batch).item())
        optimizers[1].step()
        judge.requires_grad_(False)
        optimizers[0].zero_grad()
        losses.append(backward(maker, of_maker(judge), batch).item())
        optimizers[0].step()
        judge.requires_grad_(True)
        for model in models if strategy != "none" else ():
            check_in_sync(model)
    return losses, [whole(p).detach().clone() for model in models for p in model.parameters()]


@pytest.mark.parametrize("how", ["detach", "no_grad"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "exact", "blocks"])
def test_a_gan_trains_as_in_one_process_however_the_microbatches_are_shared(strategy, how):
    wanted = trained("none", (3,) * 5, how)
    for found in run(trained, strategy, (3,) * 5, how, world_size=2):
        assert found[0] == pytest.approx(wanted[0], rel=1e-9)
        for ours, theirs in zip(found[1], wanted[1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def averaged():
    """Train a student to follow the mean of what it was; return what the teacher holds."""
    teacher = wrap_model(nn.Linear(4, 3).double(), "fsdp").requires_grad_(False)
    student = wrap_model(nn.Linear(4, 3).double(), "fsdp")
    optimizer, kinds = torch.optim.SGD(student.parameters(), 0.1), set()
    for step in range(2):
        batch = cut(pieces((3,) * 4, step))
        optimizer.zero_grad()
        backward(student, lambda m, b: (m(b[0]) - teacher(b[0] + 1)).square().mean(), batch)
        optimizer.step()
        kinds |= {type(p).__name__ for p in teacher.parameters()}
        with torch.no_grad():
            for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
    check_in_sync(teacher)
    return kinds


def test_a_frozen_teacher_is_sharded_again_after_the_step():
    assert run(averaged, world_size=2) == [{"DTensor"}] * 2


def goes_on(strategy):
    """Train a discriminator after a step of its generator that fails between the two."""
    maker, judge = (wrap_model(net, strategy) for net in pair())
    other = wrap_model(pair()[1], strategy)
    batch = cut(pieces((3,) * 3))

    def fail(_gradient):
        raise ValueError("between")

    def loss(maker, batch):
        fake = maker(batch[0])
        fake.register_hook(fail)
        return judge(fake).square().mean()

    judge.requires_grad_(False)
    raised = caught(backward, maker, loss, batch)
    judge.requires_grad_(True)
    found = [
        (backward(m, lambda m, b: m(b[1]).square().mean(), batch).item(), gradients(m))
        for m in (judge, other)
    ]
    return str(raised), found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_model_in_a_step_that_failed_trains_on(strategy):
    for raised, (ours, others) in run(goes_on, strategy, world_size=2):
        assert (raised, ours[0]) == ("ValueError: between", others[0])
        assert all(map(torch.equal, ours[1], others[1]))


# --- others that would be trained ---


def with_buffers(strategy, how):
    """Run a wrapped model with batch norm in the step of another; return the error and cures."""
    maker, judge = (wrap_model(net, strategy) for net in pair(nn.BatchNorm1d))
    copied, batch = copy.deepcopy(maker).requires_grad_(False), cut(pieces((3,) * 3))
    errors = [str(caught(backward, judge, of_judge(m, how), batch)) for m in (maker, copied)]
    backward(judge, of_judge(unwrap(copied), how), batch)
    learned = int(unwrap(copied)[1].num_batches_tracked)
    return errors, learned, str(caught(backward, judge, of_judge(maker.eval(), how), batch))


@pytest.mark.parametrize("how", ["detach", "no_grad"])
@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_a_wrapped_model_that_would_write_buffers_raises_in_others_steps(strategy, how):
    text = (
        "RuntimeError: a wrapped model must have no buffers in training mode in the `loss_fn` of "
        "another, but Generator has: call unwrap(model) there, or model.eval() before"
    )
    for errors, learned, evaluated in run(with_buffers, strategy, how, world_size=2):
        assert errors == [text, text]
        assert learned
        assert evaluated.startswith("tensor(")


def drifts():
    """Write the buffers of an exact model between its steps, on each rank from other samples."""
    maker, _ = (wrap_model(net, "exact") for net in pair(nn.BatchNorm1d))
    batch = cut(pieces((3,) * 4))
    backward(maker, lambda m, b: m(b[0]).square().mean(), batch)
    with torch.no_grad():
        unwrap(maker)(torch.randn(5, 4, dtype=torch.float64) * (1 + world().rank))
    return str(caught(backward, maker, lambda m, b: m(b[0]).square().mean(), batch))


def test_under_exact_buffers_that_differ_between_ranks_are_refused():
    for raised in run(drifts, world_size=2):
        assert "have the same in `backward`, but `1.running_mean`, `1.running_var` differ" in raised
        assert "run batch norm outside of `backward`, in the same way on every rank" in raised


class Both(nn.Module):
    def __init__(self, model, criterion):
        super().__init__()
        self.model, self.criterion = model, criterion

    def forward(self, rows):
        return self.criterion(self.model(rows))


def with_criterion(strategy):
    torch.manual_seed(0)
    net, criterion = nn.Linear(4, 3).double(), nn.Linear(3, 1).double()
    model = wrap_model(copy.deepcopy(net), strategy)
    batch = cut(pieces((3, 3, 3)))
    raised = caught(backward, model, lambda m, b: criterion(m(b[0])).square().mean(), batch)
    left = criterion.weight.grad
    model = wrap_model(Both(net, criterion), strategy)  # the cure
    backward(model, lambda m, b: m(b[0]).square().mean(), batch)
    if strategy not in ALONE:
        check_in_sync(model)
    return str(raised), left is None


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "exact", *ALONE])
def test_a_criterion_with_parameters_of_its_own_is_refused_at_every_size(strategy):
    for size in (1, 2) if strategy not in ALONE else (1,):
        for raised, nothing_left in run(with_criterion, strategy, world_size=size):
            assert nothing_left
            assert raised == TEXT.format("a parameter of shape (1, 3)") or (
                raised == TEXT.format("a parameter of shape (1,)")
            )


def leaves_of_many_kinds():
    """Train with leaves that are no parameters."""
    net = nn.Linear(4, 3).double()
    model = wrap_model(net, "ddp")

    def loss(m, b):
        rows = b[0].clone().requires_grad_()
        return (m(rows) - b[1]).square().mean()

    backward(model, loss, cut(pieces((3, 3, 3))))
    check_in_sync(model)
    assert net.weight.grad is not None


def test_inputs_with_gradients_are_fine():
    run(leaves_of_many_kinds, world_size=2)


def nested(in_microbatches):
    """Run a step of one model within that of another."""
    one, two = (wrap_model(nn.Linear(4, 3).double(), "ddp") for _ in range(2))
    batch = cut(pieces((3,) * world().size))
    batch = batch if in_microbatches else batch[0]

    def inner(m, b):
        return (m(b[0]) - b[1]).square().mean()

    def outer(m, b):
        backward(two, inner, batch)
        return inner(m, b)

    backward(one, outer, batch)
    assert one.weight.grad is not None
    assert two.weight.grad is not None
    check_in_sync(two)


def test_a_nested_step_works_but_raises_with_microbatches():
    run(nested, False, world_size=2)
    for raised in run(caught, nested, True, world_size=2):
        assert "`backward` must not be called in `loss_fn` with Microbatches" in raised.text
