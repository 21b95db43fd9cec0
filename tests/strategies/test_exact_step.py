"""One step of `backward` under strategy "exact": the same bits at every size, and what it refuses.

Each scenario runs at each size, on every rank, all of them in one job. It asserts what holds for
one step, and what it returns must be the same everywhere.
"""

import contextlib
import functools
import gc
import hashlib
import math
import random
import traceback
import warnings
import weakref
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the usual name
from on_ranks import run
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import pardata
from pardata import backward, fingerprint, unwrap, world, wrap_model
from pardata.strategies.exact import _tree_all_reduce as tree


class Net(nn.Module):
    """Batch norm, dropout, and a middle that may be checkpointed."""

    def __init__(self, around=lambda part, hidden: part(hidden)):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))
        self.last = nn.Linear(8, 3)
        self.around = around

    def forward(self, rows):
        hidden = torch.relu(self.norm(self.first(rows)))
        return self.last(self.around(self.middle, hidden) + self.around(self.middle, hidden))


class Kernels(TorchDispatchMode):
    """Counts the copies of one tensor."""

    copies = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.copies += function.__name__.split(".")[0] in ("copy_", "_to_copy")
        return function(*args, **(kwargs or {}))


def smooth():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def seeded(kind=Net, *args, dtype=None, **options):
    torch.manual_seed(0)
    net = kind(*args)
    return wrapped(net if dtype is None else net.to(dtype), **options)


def wrapped(net, **options):
    return wrap_model(net, "exact", **options)


def rows_of(count, dtype=torch.float32):
    numbers = torch.Generator().manual_seed(1)
    rows = torch.randn(count, 6, generator=numbers, dtype=torch.float64).to(dtype)
    return rows, torch.randint(3, (count,), generator=numbers)


def steps(count=22, batch_size=22, dtype=torch.float32):
    """Return a loader, of whose last step the last microbatch has two rows."""
    data = TensorDataset(*rows_of(count, dtype))
    return loader_of(data, batch_size, shuffle=True, drop_last=False, microbatch_size=4)


def loader_of(data, batch_size, **options):
    return pardata.make_loader(data, batch_size, **options, seed=5, num_workers=0)


def loss_fn(model, batch):
    rows, targets = batch
    return F.cross_entropy(model(rows), targets)


def bits(tensor):
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(bytes(flat.tolist())).hexdigest()[:16]


def outcome(model, loss):
    """Return all that a step leaves: the bits of the loss, the gradients and the buffers."""
    named = unwrap(model).named_parameters()
    gradients = {name: None if p.grad is None else bits(p.grad) for name, p in named}
    buffers = {name: bits(buffer.reshape(-1)) for name, buffer in unwrap(model).named_buffers()}
    return {"loss": loss.item(), "loss bits": bits(loss.reshape(1)), **gradients, **buffers}


def one_step(model, loss_fn=loss_fn, loader=None, **options):
    (batch, *_) = steps() if loader is None else loader
    return outcome(model, backward(model, loss_fn, batch, **options))


def again(model):
    model.norm.reset_running_stats()
    return one_step(model)


@contextlib.contextmanager
def refused(*texts):
    """Expect an error that holds each text; on the other ranks too."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # its type is looked at
        found = f"{type(error).__name__}: {error}"
        assert all(text in found for text in texts), found
    else:
        raise AssertionError(texts)


# Scenarios, in rank and size: the same bits


def plain():
    return one_step(seeded())


def low_precision():
    return one_step(seeded(dtype=torch.bfloat16), loader=steps(dtype=torch.bfloat16))


def autocast():
    """In `loss_fn`, around the forward."""

    def half(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch)

    told = one_step(seeded(), half)
    assert told["loss bits"] != plain()["loss bits"]
    return told


def checkpointed():
    told = one_step(seeded(Net, functools.partial(checkpoint, use_reentrant=False)))
    assert told == plain()
    return told


def counted():
    """The first microbatch counts nothing, be its loss NaN, and others differ by 100 times."""
    (batch, *_) = steps()
    counts = [0, 300, 3, 0, 70, 1]
    count_of = {id(held): counts[n] for held, n in zip(batch, batch.numbers, strict=True)}

    def poisoned(model, microbatch):
        return loss_fn(model, microbatch) * (1 if count_of.get(id(microbatch)) else math.nan)

    model = seeded()
    loss = backward(model, poisoned, batch, count=lambda microbatch: count_of[id(microbatch)])
    assert loss.isfinite()
    assert model.norm.num_batches_tracked == 1
    return outcome(model, loss)


def added_to():
    model = seeded()
    one_step(model)
    once = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    told = again(model)
    assert all(torch.equal(p.grad, g + 3) for p, g in zip(model.parameters(), once, strict=True))
    return told


class Sparing(nn.Module):
    """Uses one of its parts never, one in the last microbatch only, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.used, self.never, self.rarely = (nn.Linear(6, 3) for _ in range(3))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.had = nn.Parameter(torch.zeros(2))

    def forward(self, rows):
        hidden = self.frozen(rows)
        return self.used(hidden) + (self.rarely(hidden) if len(rows) == 2 else 0)


def unused():
    model = seeded(Sparing)
    model.had.grad = torch.tensor([1.5, -0.0])
    told = one_step(model)
    assert told["had"] == bits(torch.tensor([1.5, -0.0]))
    assert told["never.weight"] is told["frozen.weight"] is None
    assert told["rarely.weight"] is not None
    return told


def generators():
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)  # noqa: NPY002  # the default generator is meant
    model = wrapped(Net())

    def drawing(model, batch):
        drawn = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002  # likewise
        return loss_fn(model, batch) * (1 + drawn)

    before = states()
    first, second = one_step(model, drawing), again(model)
    assert before == states()
    assert first["loss"] != second["loss"]
    return first, second


def states():
    numpy = np.random.get_state()[1].tolist()  # noqa: NPY002  # likewise
    return bits(torch.get_rng_state()), random.getstate(), numpy


class Buffered(nn.Module):
    forward_updates_buffers = True

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.whole = nn.BatchNorm1d(6, momentum=None)  # a cumulative average
        self.last = nn.Linear(6, 3)
        self.register_buffer("constant", torch.tensor([-0.0, math.nan, math.inf, 1 / 3]))
        self.register_buffer("turns", torch.tensor([1 - 2j]))
        self.register_buffer("odd", torch.tensor([True, False]))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        self.register_buffer("shared", self.hidden)
        self.register_buffer("low", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("short", torch.ones(2, dtype=torch.float16))

    def forward(self, rows):
        if self.training:
            self.turns.mul_(1j)
            self.odd.logical_not_()
            self.hidden += 0.1
            self.low.fill_(len(rows))
            self.short.fill_(len(rows))
            self.register_buffer("new", rows.mean(0).detach())  # is left alone
        return self.last(self.whole(self.norm(rows)))


def buffers():
    """They are the mean over microbatches; what counts advances once; constants keep their bits."""
    model = seeded(Buffered)
    before = bits(model.constant)
    told = one_step(model)
    assert bits(model.constant) == before
    del told["new"], unwrap(model).new
    # What a single process computes with plain PyTorch: the mean over microbatches.
    torch.manual_seed(0)
    loader = pardata.make_loader(
        TensorDataset(*rows_of(22)), 22, shuffle=True, drop_last=False, seed=5, distributed=False
    )
    ((rows, _),) = loader
    mean = sum(len(part) / 22 * part.double().mean(0) for part in rows.split(4)) * 0.1
    torch.testing.assert_close(model.norm.running_mean.double(), mean, rtol=1e-5, atol=1e-8)
    assert model.norm.num_batches_tracked == 1
    assert model.odd.tolist() == [False, True]
    for buffer in (model.low, model.short):  # how many rows a row is among
        assert torch.equal(buffer, torch.full((2,), (5 * 4 * 4 + 2 * 2) / 22).to(buffer))
    one_step(model)
    assert model.norm.num_batches_tracked == 2
    assert model.turns.tolist() == [-1 + 2j]  # a quarter turn a step
    assert model.hidden.item() == pytest.approx(0.2)
    return told


def in_evaluation():
    model = seeded(Buffered).eval()
    before = fingerprint(model)
    told = one_step(model)
    assert fingerprint(model) == before
    return told


def in_two_steps(make, loss_fn=loss_fn):
    """Return what the second step leaves, too: what the first has learned is used there."""
    model = make()
    return one_step(model, loss_fn), one_step(model, loss_fn)


SMALL = {"bucket_cap_mb": 80 / 2**20}  # 20 numbers in float32


def small_buckets():
    """Buckets of 20 numbers: some are complete before the last gradient of a parameter comes."""

    def found(**options):
        kinds = Net, Sparing
        told = [in_two_steps(lambda kind=kind: seeded(kind, **options)) for kind in kinds]
        return [*told, in_two_steps(lambda: seeded(Layouts, **options), mean_output)]

    expected = found()
    assert found(**SMALL) == expected
    return expected


def few_microbatches():
    """Two in each step: a rank that has none sends its buckets later than the others do."""
    model = seeded(smooth, **SMALL)
    for batch in loader_of(TensorDataset(*rows_of(24)), 8, microbatch_size=4):
        pardata.backward(model, loss_fn, batch)
    return [bits(parameter.grad) for parameter in model.parameters()]


@contextlib.contextmanager
def sends():
    """Note what is sent: how many numbers, and how many bytes this rank sends to others."""
    noted, size = [], world().size

    def noting(send, sent_of):
        def sending(*args, **options):
            noted.append(sent_of(*args))
            return send(*args, **options)

        return sending

    def reduced(numbers, *_args):
        return numbers.numel(), 2 * numbers.nbytes * (size - 1) / size

    def handed_out(_received, numbers, *_args):
        return numbers.numel(), numbers.nbytes * (size - 1) / size

    def gathered(_received, numbers):
        return numbers.numel(), numbers.nbytes * (size - 1)

    with (
        patch.object(dist, "all_reduce", noting(dist.all_reduce, reduced)),
        patch.object(dist, "all_to_all_single", noting(dist.all_to_all_single, handed_out)),
        patch.object(tree, "_all_gather", noting(tree._all_gather, gathered)),
    ):
        yield noted


def bytes_sent():
    """They are those of DDP where each rank has one piece, and the few that means take."""
    model = seeded(nn.Linear, 6, 20_000)
    count = sum(p.numel() for p in model.parameters())
    size = world().size
    rows, _ = rows_of(24)
    loader = loader_of(TensorDataset(rows), 24, microbatch_size=2)
    with sends() as noted:
        told = one_step(model, mean_output, loader)
    sent = sum(nbytes for _, nbytes in noted)
    of_ddp = 2 * 4 * count * (size - 1) / size
    # In thirds or fifths of a tree of halves a rank has up to three pieces, and sends each.
    assert of_ddp <= sent <= of_ddp * (1 if size in (1, 2, 4) else 2) + 4000, (sent, of_ddp)
    return told


LAYOUTS = {
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "channels_last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "turned": torch.tensor([[1 + 2j, -0.5j], [0, 1]]).t(),
    "low": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "high": torch.tensor([1.0, 2.0], dtype=torch.float64),
}


class Layouts(nn.Module):
    def __init__(self):
        super().__init__()
        for name, start in LAYOUTS.items():
            self.register_parameter(name, nn.Parameter(start.clone()))

    def forward(self, rows):
        parts = [(p * p.detach()).sum().abs() for p in self.parameters()]
        return sum(part.float() for part in parts) * rows.mean()


def compiled():
    """Each size of inputs is compiled, or the step fails: no rank runs some of them uncompiled."""
    warnings.simplefilter("ignore")  # dynamo's own deprecations

    def of_many_sizes(model, batch):
        return sum(model(batch[0][:1].expand(count, 6)).mean() for count in range(5, 9))

    torch._dynamo.reset()  # what was compiled before counts too
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=False):
        model = seeded(lambda: torch.compile(smooth(), backend="eager", dynamic=False))
        told = one_step(model)
        with refused("FailOnRecompileLimitHit: "):
            one_step(model, of_many_sizes)
    torch._dynamo.reset()
    return told


def layouts():
    """A gradient has the shape, dtype and layout of its parameter."""
    model = seeded(Layouts)
    told = one_step(model, mean_output)
    for p in model.parameters():
        assert (p.grad.dtype, p.grad.stride()) == (p.dtype, p.stride())
        assert not p.grad.requires_grad
        if p.ndim > 1 and p.numel() and p.is_floating_point():  # the gradient is a multiple of it
            factor = (p.grad / p.detach()).reshape(-1)[-1]
            torch.testing.assert_close(p.grad, p.detach() * factor)
    return told


# Refused


class Exploding(nn.Module):
    """Its gradient is `factor` in the last microbatch, that of two rows."""

    forward_updates_buffers = True

    def __init__(self, factor):
        super().__init__()
        self.calm, self.wild = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(1))
        self.factor = factor

    def forward(self, rows):
        self.seen += 1
        wild = self.wild.sum()
        if len(rows) == 2:
            wild.register_hook(lambda gradient: gradient * self.factor)
        return self.calm.sum() * rows.mean() + wild


def mean_output(model, batch):
    return model(batch[0]).mean()


def not_finite():
    """What is infinite or NaN in one microbatch is so in the sum, as under "ddp", and no error."""

    def infinite(model, batch):
        return mean_output(model, batch) + (math.inf if len(batch[0]) == 2 else 0.0)

    def spoiling(model, batch):
        loss = mean_output(model, batch)
        unwrap(model).seen.fill_(math.nan)
        return loss

    told = []
    for factor in (math.inf, -math.inf, math.nan, 1e15):
        model = seeded(Exploding, factor)
        assert one_step(model, mean_output)["loss"] < math.inf
        calm, wild = model.calm.grad, model.wild.grad
        assert calm.isfinite().all()
        told.append(wild.tolist())
        torch.testing.assert_close(
            wild, torch.full((2,), factor * 2 / 22), equal_nan=True, rtol=1e-3, atol=0.0
        )
    model = seeded(Exploding, 1.0)
    assert one_step(model, infinite)["loss"] == math.inf
    one_step(model, spoiling)
    assert model.seen.isnan()
    return told


class Zero(nn.Module):
    def __init__(self):
        super().__init__()
        self.calm, self.other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, factor):
        return self.other.sum() if factor is None else (self.calm * factor).sum()


def zeros_with_signs():
    """A sum of -0.0 is that at every size, beside microbatches that do not use the parameter."""

    def sign(*sizes_of_minus):
        """Return whether the sum of what microbatches of these sizes leave has a sign."""

        def zero(model, batch):
            size = len(batch[0])
            return model(-0.0 if size in sizes_of_minus else None if size == 4 else 0.0)

        model = seeded(Zero)
        one_step(model, zero)
        return torch.signbit(model.calm.grad).tolist()

    assert sign(2) == sign(2, 4) == [True] * 3
    assert sign(4) == [False] * 3
    return sign(2), sign(4)


def kept_by_reference():
    """A gradient that a user keeps stays what it was, and old ones count once."""
    model = seeded(smooth)
    one_step(model)
    kept = [p.grad for p in model.parameters()]
    before = [grad.clone() for grad in kept]
    model.zero_grad()
    told = one_step(model, lambda model, batch: 2 * loss_fn(model, batch))
    assert all(map(torch.equal, kept, before))
    return told


def sparse():
    text = (
        "ValueError: gradients must be dense under 'exact', but `model` has sparse=True: leave it"
    )
    with refused(text):
        seeded(functools.partial(nn.Embedding, 9, 3, sparse=True))


CHANGES = {
    "(3,)": lambda net: setattr(net, "cache", torch.zeros(3)),
    "None": lambda net: setattr(net, "cache", None),
    "None: give": lambda net: delattr(net, "cache"),
}


def buffers_of_other_shapes():
    text = "a buffer must keep its shape in a step of 'exact', but `cache` was (2,)"
    for shown, change in CHANGES.items():
        net = nn.Linear(6, 3)
        net.register_buffer("cache", torch.zeros(2))
        net.register_forward_pre_hook(lambda net, _, change=change: change(net))
        with refused(text, f" and is {shown}"):
            one_step(wrapped(net))


def failing_while_others_could_send():
    """The others send nothing of what is complete before the last backward has ended."""

    def failing(model, batch):
        if world().rank == world().size - 1:
            raise OSError("no such file")
        return loss_fn(model, batch)

    model = seeded(smooth, **SMALL)
    told = one_step(model)  # after which there are several buckets
    with refused("" if world().rank == world().size - 1 else "failed in `backward`: OSError"):
        one_step(model, failing)
    model.zero_grad()
    assert one_step(model) == told
    return told


def failing_on_one_rank():
    """An error of the user's on the last rank, in each place of its code, is one on all."""
    is_last = world().rank == world().size - 1
    model = seeded()

    def in_loss(model, batch):
        if is_last:
            raise OSError("no such file")
        return loss_fn(model, batch)

    def after_some(model, batch):
        return in_loss(model, batch) if len(batch[0]) == 2 else loss_fn(model, batch)

    def no_loss(model, batch):
        return None if is_last else loss_fn(model, batch)

    def no_gradient(model, batch):
        return loss_fn(model, batch).detach() if is_last else loss_fn(model, batch)

    def without_model(model, batch):
        return torch.zeros((), requires_grad=True) if is_last else loss_fn(model, batch)

    before = fingerprint(model)
    for wrong in (in_loss, after_some, no_loss, no_gradient, without_model):
        with refused("" if is_last else f"rank {world().size - 1} failed in `backward`: "):
            one_step(model, wrong)
        assert fingerprint(model) == before
        assert all(p.grad is None for p in model.parameters())
    with refused("not negative, but is -1" if is_last else "failed in `backward`: ValueError"):
        one_step(model, count=lambda _: -1 if is_last else 4)
    with refused("all its microbatches count 0"):
        one_step(model, count=lambda _: 0)
    return one_step(model)


def at_other_steps():
    """Ranks at other steps, or with other parameters, or other buffers, find out."""
    here = world()
    model = seeded()
    batches = list(steps(40, 20))
    if here.size > 1:
        text = "RuntimeError: every rank must have the same in `backward`, but `"
        with refused(text):
            backward(model, loss_fn, batches[here.rank == here.size - 1])
        unwrap(model).first.requires_grad_(here.rank > 0)
        with refused(text):
            backward(model, loss_fn, batches[0])
        unwrap(model).first.requires_grad_(True)
        if here.rank == 0:
            unwrap(model).register_buffer("extra", torch.zeros(3))
        with refused(text):
            backward(model, loss_fn, batches[0])
        if here.rank == 0:
            del unwrap(model).extra
        assert all(p.grad is None for p in model.parameters())
    return backward(model, loss_fn, batches[0]).item()


SCENARIOS = [
    *(plain, low_precision, autocast, checkpointed, counted, added_to, unused, generators),
    *(buffers, in_evaluation, small_buckets, bytes_sent, compiled, layouts),
    *(not_finite, zeros_with_signs, kept_by_reference, sparse, buffers_of_other_shapes),
    *(failing_on_one_rank, failing_while_others_could_send, at_other_steps, few_microbatches),
]


def every_scenario():
    return {scenario.__name__: told_by(scenario) for scenario in SCENARIOS}


def told_by(scenario):
    """Return what a scenario tells, and what went wrong: the others shall run."""
    try:
        return scenario(), None
    except Exception:  # noqa: BLE001  # shown by the test
        return None, traceback.format_exc()


@functools.cache
def told_at(size):
    """Return what each scenario tells, by name, on each rank."""
    return run(every_scenario, world_size=size, timeout=200)


def check(scenario, sizes):
    name = scenario.__name__
    reference, _ = told_at(1)[0][name]
    for size in sizes:
        for rank, facts in enumerate(told_at(size)):
            found, broken = facts[name]
            assert broken is None, f"rank {rank} of {size}: {broken}"
            assert repr(found) == repr(reference), (size, rank)  # NaN is equal to NaN


scenarios = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)


@scenarios
def test_a_step_leaves_the_same_bits_on_every_rank_at_every_size(scenario):
    check(scenario, [1, 2, 3])


@scenarios
@pytest.mark.soak
def test_and_at_larger_ones(scenario):
    check(scenario, [4, 5])


# In a single process


def test_a_loss_that_its_own_backward_needs_is_left_alone():
    # The backward of exp() looks at its result, which is the loss.
    model = seeded(smooth, dtype=torch.float64)

    def exponential(model, batch):
        return model(batch[0]).mean().exp()

    one_step(model, exponential, steps(dtype=torch.float64))
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def copies_of_a_step(norms):
    model = wrapped(
        nn.Sequential(*[nn.BatchNorm1d(6, affine=False) for _ in range(norms)], nn.Linear(6, 3))
    )
    (batch,) = steps()
    with Kernels() as kernels:
        backward(model, loss_fn, batch)
    return kernels.copies


def test_buffers_are_read_and_put_back_together_and_not_one_by_one():
    assert run(copies_of_a_step, 20) == run(copies_of_a_step, 1)


def graphs_of_a_step():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    net = torch.compile(smooth(), backend=backend, dynamic=False)
    one_step(
        wrapped(net, **SMALL), loader=loader_of(TensorDataset(*rows_of(24)), 24, microbatch_size=4)
    )
    return len(graphs)


def test_dynamo_does_not_split_a_compiled_model():
    assert run(graphs_of_a_step, world_size=2) == [1, 1]


def under_no_sync():
    model = seeded(smooth)
    with model.no_sync(), refused("`backward` must run without no_sync()"):
        one_step(model)
    return one_step(model)


def test_a_step_under_no_sync_raises_on_every_rank():
    first, second = run(under_no_sync, world_size=2)
    assert first == second


def held_after_an_error():
    """Return whether what a `loss_fn` that failed has computed is still in memory."""
    computed = []

    def failing(model, batch):
        hidden = model(batch[0])
        computed.append(weakref.ref(hidden))
        raise OSError("no such file")

    model = seeded(smooth)
    gc.disable()
    with refused("no such file"):
        one_step(model, failing)
    return computed[0]() is not None


@pytest.mark.parametrize("size", [1, 2])
def test_a_failed_step_holds_no_tensor(size):
    assert not any(run(held_after_an_error, world_size=size))


def in_other_calls():
    model = seeded(smooth)
    (batch,) = steps()
    with refused("every rank must make the same calls in the same order"):
        if world().rank:
            pardata.all_reduce_mean(1.0)
        else:
            backward(model, loss_fn, batch)
    return pardata.all_reduce_mean(1.0)


def test_a_rank_in_another_call_is_an_error_on_every_rank():
    assert run(in_other_calls, world_size=2) == [1.0, 1.0]


def failing_in_the_last_backward():
    is_last = world().rank == world().size - 1

    def fail(_):
        raise OSError("no such file")

    def failing(model, batch):
        loss = loss_fn(model, batch)
        if is_last and len(batch[0]) == 2:  # the last microbatch, after ranks are compared
            loss.register_hook(fail)
        return loss

    model = seeded(smooth)
    with refused("no such file" if is_last else "failed in `backward`: OSError"):
        one_step(model, failing)
    return one_step(model)


def test_an_error_in_the_last_backward_is_one_on_every_rank():
    first, second = run(failing_in_the_last_backward, world_size=2)
    assert first == second
