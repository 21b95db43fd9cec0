"""Batch norm over all ranks on CPUs: plain DDP equals one process that has the whole batch."""

import copy
import functools
import itertools
import pickle
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from on_ranks import caught, run, run_caught
from sharding import TOGETHER, needs_fsdp, whole
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pardata import backward, check_in_sync, make_loader, unwrap, world, wrap_model
from pardata.model._batch_norm import is_synchronised

SIZES = [1, 3, pytest.param(4, marks=pytest.mark.soak)]
ROWS = 12
STEPS = 3


# Models, all of float64; the first dimension of what they take is the batch's


class Shared(nn.Module):
    """One batch norm at two places, of one parent and of another."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(5)
        self.first = nn.Sequential(nn.Linear(4, 5), norm, nn.Tanh(), norm)
        self.again = norm
        self.kept = [norm]  # where no search through the children finds it

    def forward(self, rows):
        return self.kept[0](torch.sin(self.again(self.first(rows))))


class Nested(nn.Module):
    """Batch norms at several depths, one of them frozen in evaluation."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.BatchNorm1d(5), nn.Tanh()))
        self.frozen = nn.BatchNorm1d(5).eval()
        self.blocks = nn.ModuleDict({"a": block, "b": nn.ModuleList([nn.BatchNorm1d(5)])})
        self.first = nn.Linear(4, 5)

    def forward(self, rows):
        rows = self.frozen(self.blocks["a"](self.first(rows)))
        return self.blocks["b"][0](rows)


class AnyShape(nn.BatchNorm1d):
    """A class of a user's that changes what it takes, and not what it does."""

    def _check_input_dim(self, input):  # noqa: A002
        pass


def dense(norm):
    return nn.Sequential(nn.Linear(4, 5), norm, nn.Tanh(), nn.Linear(5, 2))


def image(norm):
    return nn.Sequential(nn.Conv2d(4, 5, 2), norm, nn.Tanh(), nn.Conv2d(5, 2, 2))


def untracking():
    net = dense(nn.BatchNorm1d(5))
    net[1].track_running_stats = False  # as one stops the statistics, and keeps what they are
    return net


MODELS = {
    "1d": lambda: dense(nn.BatchNorm1d(5)),
    "1d, sequences": lambda: nn.Sequential(nn.Conv1d(4, 5, 2), nn.BatchNorm1d(5), nn.Tanh()),
    "2d": lambda: image(nn.BatchNorm2d(5, momentum=0.3, eps=1e-3)),
    "3d": lambda: nn.Sequential(nn.Conv3d(4, 5, 2), nn.BatchNorm3d(5), nn.Tanh()),
    "channels_last": lambda: image(nn.BatchNorm2d(5)).to(memory_format=torch.channels_last),
    "affine=False": lambda: dense(nn.BatchNorm1d(5, affine=False)),
    "momentum=None": lambda: dense(nn.BatchNorm1d(5, momentum=None)),
    "momentum=0": lambda: dense(nn.BatchNorm1d(5, momentum=0.0)),
    "untracked": lambda: dense(nn.BatchNorm1d(5, track_running_stats=False)),
    "tracking stopped": untracking,
    "frozen affine": lambda: dense(nn.BatchNorm1d(5).requires_grad_(False)),
    "no bias": lambda: dense(nn.BatchNorm1d(5)),
    "first": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)),
    "the model itself": lambda: nn.BatchNorm1d(4),
    "shared": Shared,
    "nested": Nested,
    "of a class of the user's": lambda: dense(AnyShape(5)),
}
SHAPES = {"1d, sequences": (4, 6), "2d": (4, 5, 6), "channels_last": (4, 5, 6), "3d": (4, 3, 4, 3)}


def made(name):
    torch.manual_seed(0)
    net = MODELS[name]().double()
    if name == "no bias":
        net[1].bias = None  # as BatchNorm1d(5, bias=False), which only new PyTorch has
    for module in net.modules():
        if isinstance(module, _BatchNorm) and module.weight is not None:
            nn.init.normal_(module.weight)
    return net


def numbers(name, step):
    drawn = torch.Generator().manual_seed(step)
    rows = torch.randn(ROWS, *SHAPES.get(name, (4,)), generator=drawn, dtype=torch.float64)
    # Off zero, and of other spread in each channel and row: so that what is weighted wrongly shows.
    return rows * torch.linspace(0.5, 3, ROWS).view(-1, *[1] * (rows.dim() - 1)) + 2


def loss_of(output, counts=ROWS):
    """Return the mean of what a row loses, if `output` were `counts` rows."""
    return (output - 0.5).square().flatten(1).mean(dim=1).sum() / counts


SHARES = {
    "even": lambda size: [len(part) for part in torch.arange(ROWS).tensor_split(size)],
    "uneven": lambda size: [ROWS - size + 1] + [1] * (size - 1),
    "none on the last": lambda size: [ROWS // (size - 1)] * (size - 1) + [0] if size > 1 else [12],
    "none on the first": lambda size: [0, ROWS] + [0] * (size - 2) if size > 1 else [12],
}


def train(name, bounds, run_backward):
    """Return what a few steps leave: outputs, gradients, weights and statistics after each."""
    net = made(name)
    wrapped = wrap_model(net, "ddp", sync_batchnorm=True) if dist.is_initialized() else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(STEPS):
        rows = numbers(name, step)[bounds].requires_grad_()
        optimizer.zero_grad()
        output = run_backward(wrapped, rows)
        gradients = {
            f"{key}.grad": tensor.grad.clone()
            for key, tensor in net.named_parameters()
            if tensor.grad is not None
        }
        optimizer.step()
        state = {key: tensor.clone() for key, tensor in net.state_dict().items()}
        found.append((output.detach(), rows.grad, {**gradients, **state}))
    if dist.is_initialized():
        check_in_sync(wrapped)  # to the bit
    rows = numbers(name, STEPS)
    with torch.no_grad():
        evaluated = wrapped.eval()(rows) if world().rank == 0 else None  # nobody else needs to
    return found, evaluated


def plainly(wrapped, rows):
    output = wrapped(rows)
    # DDP takes the mean over the ranks: of what is meant as a sum.
    (loss_of(output) * world().size).backward()
    return output


def by_backward(wrapped, rows):
    outputs = []

    def loss_fn(model, batch):
        outputs.append(model(batch))
        return loss_of(outputs[-1], max(len(batch), 1))

    backward(wrapped, loss_fn, rows)
    return outputs[0]


HOW = {"a scaled loss": plainly, "pardata.backward": by_backward}
FEW = ["1d", "channels_last", "affine=False", "shared"]
CASES = [
    *(("a scaled loss", "uneven", name) for name in MODELS),
    *itertools.product(["a scaled loss"], ["even", "none on the last", "none on the first"], FEW),
    *itertools.product(["pardata.backward"], SHARES, FEW),
]


def every_training():
    rank, size = world().rank, world().size
    found = {}
    for how, kind, name in CASES:
        ends = torch.tensor([0, *SHARES[kind](size)]).cumsum(0).tolist()
        if size > 1 or kind == "uneven":  # one process has all in any case
            found[how, kind, name] = train(name, slice(ends[rank], ends[rank + 1]), HOW[how])
    return found


@functools.cache
def on(size):
    return run(every_training, world_size=size)


@functools.cache
def alone(name):
    return train(name, slice(None), plainly)


def same(ours, theirs, what):
    # Relative to the whole tensor: what cancels has no more digits than what it is made of.
    assert ours.shape == theirs.shape, what
    assert ours.dtype == theirs.dtype, what
    scale = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12 * scale), what


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", SIZES)
def test_every_number_of_training_is_that_of_one_process(name, size):
    steps, evaluated = alone(name)
    for case in [case for case in on(size)[0] if case[2] == name]:
        told = [found[case] for found in on(size)]
        for step, (output, on_rows, tensors) in enumerate(steps):
            parts = [found[step] for found, _ in told]
            same(torch.cat([part for part, _, _ in parts]), output, (case, step, "output"))
            # Each rank's own, and not the mean of the ranks.
            gradients = torch.cat([gradient for _, gradient, _ in parts]) / size
            same(gradients, on_rows, (case, step, "input"))
            for rank, (_, _, found) in enumerate(parts):
                assert list(found) == list(tensors)
                for key, tensor in tensors.items():
                    same(found[key], tensor, (case, step, rank, key))
        same(told[0][1], evaluated, (case, "evaluated"))


def float32_and_bfloat16():
    rank, size = world().rank, world().size
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        net = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 1, 1).to(dtype))
        wrapped = wrap_model(net, "ddp", sync_batchnorm=True)
        rows = images(dtype).tensor_split(size)[rank].requires_grad_()
        output = unwrap(wrapped)[0](rows)
        output.float().square().sum().backward()
        found[dtype] = output.detach(), rows.grad, net[0].running_var, net[0].weight.grad
    return found


def images(dtype):
    return torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0)).add(3).to(dtype)


def test_float32_and_bfloat16_are_computed_as_by_pytorch():
    told = run(float32_and_bfloat16, world_size=3)
    for dtype, digits in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        norm = nn.BatchNorm2d(3)
        rows = images(dtype).requires_grad_()
        output = norm(rows)
        output.float().square().sum().backward()
        parts = [found[dtype] for found in told]
        ours = torch.cat([part[0] for part in parts])
        torch.testing.assert_close(ours, output, rtol=digits, atol=digits)
        gradient = torch.cat([part[1] for part in parts])
        torch.testing.assert_close(gradient, rows.grad, rtol=digits, atol=digits)
        for _, _, variance, _ in parts:
            torch.testing.assert_close(variance, norm.running_var, rtol=1e-5, atol=1e-6)
        total = sum(part[3] for part in parts)
        torch.testing.assert_close(total, norm.weight.grad, rtol=digits, atol=digits)


# When the ranks wait for each other


def collectives(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call()
    names = [event.name for event in profile.events()]
    return Counter(name[6:] for name in names if name.startswith("c10d::")), result


def counted():
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    wrap_model(net, "ddp", sync_batchnorm=True)
    rows = numbers("first", 0)
    forward, output = collectives(lambda: net(rows))
    behind, _ = collectives(lambda: loss_of(output).backward())
    without_gradient, _ = collectives(torch.no_grad()(lambda: net(rows)))
    net[0].eval()
    frozen, _ = collectives(lambda: net(rows))
    net.eval()
    evaluated, _ = collectives(lambda: net(rows))
    untracking = bare(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    untracked, _ = collectives(lambda: untracking(rows))
    return forward, behind, without_gradient, frozen, evaluated, untracked


def bare(norm):
    return unwrap(wrap_model(nn.Sequential(norm.double()), "ddp", sync_batchnorm=True))[0]


def test_each_norm_costs_one_collective_forward_and_one_backward_and_evaluation_none():
    # The first layer's input has no gradient that the others' would be needed for.
    trained, behind, frozen = {"allgather_": 2}, {"allreduce_": 1}, {"allgather_": 1}
    expected = [trained, behind, trained, frozen, {}, {}]
    assert [list(map(dict, told)) for told in run(counted, world_size=3)] == [expected] * 3


# What becomes of the module


def fields(norm):
    fields = {key: value for key, value in vars(norm).items() if not key.startswith("_")}
    fields.pop("forward", None)
    return fields


def what_stays():
    calls = []
    norm = nn.BatchNorm2d(3, eps=1e-2, momentum=0.2).eval()
    norm.mine = "kept"
    norm.register_forward_hook(lambda *_: calls.append("forward"))
    norm.register_full_backward_hook(lambda *_: calls.append("backward"))
    norm.weight.register_hook(lambda _: calls.append("weight"))
    norm.register_state_dict_post_hook(lambda *_: calls.append("state"))
    net = nn.Sequential(norm, nn.Conv2d(3, 1, 1))
    plain = copy.deepcopy(net)
    before = fields(norm), list(net.state_dict()), list(map(id, net.parameters()))
    calls.clear()
    wrapped = wrap_model(net, "ddp", sync_batchnorm=True)
    after = fields(norm), list(wrapped.state_dict()), list(map(id, net.parameters()))
    assert after == before
    assert calls == ["state"]
    assert is_synchronised(norm)
    assert type(norm) is nn.BatchNorm2d  # by which users find them
    assert net[0] is norm
    assert not norm.training
    assert net[1].training
    wrapped.train()(images(torch.float32).requires_grad_()).sum().backward()
    assert calls == ["state", "forward", "weight", "backward"]
    assert "eps=0.01, momentum=0.2, affine=True" in repr(norm)
    plain.load_state_dict(wrapped.state_dict())
    wrapped.load_state_dict(plain.state_dict())
    return pickle.dumps(copy.deepcopy(nn.Sequential(bare(nn.BatchNorm1d(2)))))


def test_hooks_mode_parameters_class_and_state_are_those_of_the_original():
    for pickled in run(what_stays, world_size=2):
        # Without other processes it is the batch norm that it was, in training too.
        net, plain = pickle.loads(pickled), nn.BatchNorm1d(2).double()
        assert type(net[0]) is nn.BatchNorm1d
        assert is_synchronised(net[0])
        assert net[0].forward.args == (net[0],)
        rows = numbers("1d", 0)[:, :2]
        assert torch.equal(net(rows), plain(rows))
        assert torch.equal(net[0].running_var, plain.running_var)
        assert net[0].num_batches_tracked == 1


class Doubled(nn.BatchNorm1d):
    def forward(self, rows):
        return 2 * super().forward(rows)


def doubled_here():
    norm = nn.BatchNorm1d(4)
    norm.forward = lambda rows: 2 * rows
    return norm


def wrapped_twice():
    net = dense(nn.BatchNorm1d(5))
    norms = [unwrap(wrap_model(net, "ddp", sync_batchnorm=True))[1] for _ in range(2)]
    return norms == [net[1]] * 2 and is_synchronised(net[1])


def wrapped_with(norm):
    net = dense(norm)
    try:
        wrap_model(net, "ddp", sync_batchnorm=True)
    finally:
        assert net[1] is norm
    return is_synchronised(norm)


def which_are_replaced():
    kinds = [AnyShape(5), nn.InstanceNorm1d(5), Doubled(5), doubled_here(), nn.SyncBatchNorm(5)]
    return wrapped_twice(), *(caught(wrapped_with, norm) for norm in kinds)


def test_which_modules_are_replaced_and_which_refused():
    for *told, own_class, own_forward, pytorchs in run(which_are_replaced, world_size=2):
        assert told == [True, True, False]
        for raised, kind in ((own_class, "Doubled"), (own_forward, "BatchNorm1d")):
            assert (
                "ValueError: `sync_batchnorm` must find batch norms with PyTorch's own forward, to "
                f"replace it, but `1` ({kind}) has another: put what it adds into a module next to"
            ) in str(raised)
        assert "SyncBatchNorm layers only work with GPU modules" in pytorchs.text


def twice_differentiated(norm, rows):
    (gradient,) = torch.autograd.grad(norm(rows).square().sum(), rows, create_graph=True)
    gradient.sum().backward()


def row_on_the_last(norm, rows):
    return norm(rows[: 1 if world().rank == world().size - 1 else 0])


# A batch norm, what is done with it, and what is said.
FLOATS = "ValueError: `input` must hold floating-point numbers"
MUST = (
    "ValueError: batch norm must have more than one number per channel in training, but all ranks"
)
WRONG = [
    (nn.BatchNorm1d, row_on_the_last, f"{MUST} together have 1: use a larger batch"),
    (nn.BatchNorm1d, lambda norm, rows: norm(rows[:0]), f"{MUST} together have 0: use a larger"),
    (nn.BatchNorm1d, lambda norm, rows: norm(rows[None, None]), "expected 2D or 3D input (got 4D"),
    (nn.BatchNorm2d, lambda norm, rows: norm(rows[:, :, None]), "expected 4D input (got 3D input)"),
    (AnyShape, lambda norm, rows: norm(rows[0]), "but is torch.float64 of shape (4,): fit"),
    (nn.BatchNorm1d, lambda norm, rows: norm(rows[:, :1]), "but is torch.float64 of shape (2, 1)"),
    (nn.BatchNorm1d, lambda norm, rows: norm(rows.long()), f"{FLOATS} of 4 channels, its second"),
    (
        nn.BatchNorm1d,
        twice_differentiated,
        "RuntimeError: trying to differentiate twice a function",
    ),
]


def every_wrong():
    rows = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    found = [caught(wrong, bare(make(4)), rows) for make, wrong, _ in WRONG]
    return found, bare(nn.BatchNorm1d(4))(numbers("first", 0)).shape  # the group works


def test_what_cannot_be_normalised_is_an_error_on_every_rank_that_leaves_the_group_usable():
    for found, shape in run(every_wrong, world_size=3):
        assert shape == (ROWS, 4)
        for raised, (*_, text) in zip(found, WRONG, strict=True):
            assert text in str(raised)


# With microbatches


def microbatches(size, rows=ROWS):
    """Return this rank's share of a step of `rows`, in microbatches of `size`."""
    (step,) = make_loader(numbers("1d", 0)[:rows], rows, microbatch_size=size, num_workers=0)
    return step


def mean_loss(model, batch):
    return loss_of(model(batch), len(batch))


def left_by_training(net):
    """Return gradients and statistics."""
    return [whole(p.grad) for p in net.parameters()] + [whole(buffer) for buffer in net.buffers()]


def in_microbatches(strategy, microbatch_size):
    batch, net = microbatches(microbatch_size), made("1d")
    wrapped = wrap_model(net, strategy, sync_batchnorm=True)
    before = [tensor.clone() for tensor in net.state_dict().values()]
    try:
        backward(wrapped, mean_loss, batch)
    finally:
        # Nothing was run; and the group works, as do a frozen model and one without batch norm.
        after = net.state_dict().values()
        assert all(torch.equal(*map(whole, pair)) for pair in zip(before, after, strict=True))
        assert all(parameter.grad is None for parameter in net.parameters())
        net[1].eval()
        backward(wrapped, mean_loss, batch)
        net[1].train()
        assert caught(backward, wrapped, mean_loss, batch).type == "ValueError"
        backward(wrap_model(made("1d"), "ddp"), mean_loss, batch)


@pytest.mark.parametrize(("size", "microbatch_size"), [(2, 3), (2, 4), (2, ROWS), (3, 4)])
@pytest.mark.parametrize("strategy", TOGETHER)
def test_microbatches_are_refused_on_every_rank_before_anything_runs(
    strategy, size, microbatch_size
):
    for raised in run_caught(in_microbatches, strategy, microbatch_size, world_size=size):
        assert str(raised) == (
            "ValueError: `batch` must be what a loader without `microbatch_size` yields for a "
            "model with SyncBatchNorm, which takes the statistics of the global batch, but is "
            "Microbatches, of which only some run at once: leave out microbatch_size, or "
            "sync_batchnorm, so that each microbatch has its own"
        )


def test_one_process_takes_any_number_of_microbatches_with_pytorchs_too():
    net = nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 1)).double()
    assert backward(net, mean_loss, microbatches(4)) > 0


# Under "fsdp"


def sharded(share):
    rank, size = world().rank, world().size
    net = made("2d")
    ends = torch.tensor([0, *SHARES[share](size)]).cumsum(0).tolist()
    wrapped = wrap_model(net, "fsdp", sync_batchnorm=True)
    output = wrapped(numbers("2d", 0)[ends[rank] : ends[rank + 1]])
    (loss_of(output) * size).backward()
    return left_by_training(net)


@needs_fsdp
@pytest.mark.parametrize("share", ["uneven", "none on the first"])
def test_a_sharded_model_is_normalised_over_all_ranks_too(share):
    net = made("2d")
    loss_of(net(numbers("2d", 0))).backward()
    for told in run(sharded, share, world_size=2):
        for ours, theirs in zip(told, left_by_training(net), strict=True):
            same(ours, theirs, "gradients and statistics")
