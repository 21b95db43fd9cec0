"""One step of `backward` under strategy "exact": the same bits at every size, and what it refuses.

Each scenario runs at each size, on every rank, all of them in one job; what it returns must be the
same everywhere.
"""

import functools
import hashlib
import logging
import math
import random
import traceback
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from on_ranks import run
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from pardata import (
    Microbatches,
    backward,
    check_in_sync,
    fingerprint,
    make_loader,
    unwrap,
    world,
    wrap_model,
)
from pardata.gradient import _exact_sums

SIZES = [1, 2, 3, 4]


class Net(nn.Module):
    """Batch norm, dropout, and a middle that may be checkpointed."""

    def __init__(self, around=None):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))
        self.last = nn.Linear(8, 3)
        self.around = around

    def forward(self, rows):
        hidden = torch.relu(self.norm(self.first(rows)))
        run_middle = self.around or (lambda part, hidden: part(hidden))
        # Twice: with reentrant checkpointing each of its gradients then comes by itself.
        hidden = run_middle(self.middle, hidden) + run_middle(self.middle, hidden)
        return self.last(hidden)


def seeded(kind=Net, *args, dtype=None, **options):
    torch.manual_seed(0)
    net = kind(*args)
    return wrap_model(net if dtype is None else net.to(dtype), "exact", **options)


def rows_of(count, dtype=torch.float32):
    numbers = torch.Generator().manual_seed(1)
    rows = torch.randn(count, 6, generator=numbers, dtype=torch.float64).to(dtype)
    return rows, torch.randint(3, (count,), generator=numbers)


def steps(count=22, batch_size=22, dtype=torch.float32):
    data = TensorDataset(*rows_of(count, dtype))
    return make_loader(
        data, batch_size, shuffle=True, drop_last=False, microbatch_size=4, seed=5, num_workers=0
    )


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


def raised(fn, *args, **options):
    try:
        fn(*args, **options)
    except Exception as error:  # noqa: BLE001  # its type is looked at
        return f"{type(error).__name__}: {error}"
    return None


# Scenarios, in rank and size


def plain():
    return one_step(seeded())


def autocast():
    def low(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch)

    outside = seeded()
    with torch.autocast("cpu", torch.bfloat16):
        around_all = one_step(outside)
    return one_step(seeded(), low), around_all


def low_precision():
    return one_step(seeded(dtype=torch.bfloat16), loader=steps(dtype=torch.bfloat16))


def checkpointed():
    told = {}
    for name, options in {
        "reentrant": {"use_reentrant": True},
        "not": {"use_reentrant": False},
    }.items():
        told[name] = one_step(seeded(Net, functools.partial(checkpoint, **options)))
    return told


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.out.weight = self.into.weight

    def forward(self, rows):
        return self.out(torch.tanh(self.into(rows)))


def tied():
    return one_step(seeded(Tied))


def ranks_without():
    model = seeded()
    return [outcome(model, backward(model, loss_fn, batch)) for batch in steps(12, 8)]


def counted():
    """The first microbatch counts nothing, be its loss NaN, and others differ by 100 times."""
    model = seeded()
    counts = iter([0, 300, 3, 0, 70, 1])
    (batch, *_) = steps()
    all_counts = list(counts)

    def poisoned(model, microbatch):
        loss = loss_fn(model, microbatch)
        return loss * math.nan if weight(microbatch) == 0 else loss

    own = [all_counts[batch.first + n] for n in range(len(batch))]
    by_id = {id(microbatch): count for microbatch, count in zip(batch, own, strict=True)}

    def weight(microbatch):
        return by_id[id(microbatch)]

    told = outcome(model, backward(model, poisoned, batch, count=weight))
    return told, model.norm.num_batches_tracked.item(), math.isfinite(told["loss"])


def clipped():
    model = seeded()
    one_step(model)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return norm.item(), outcome(model, norm)


def added_to():
    model = seeded()
    one_step(model)
    once = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    told = one_step_again(model)
    return told, all(torch.equal(p.grad, g + 3) for p, g in zip(model.parameters(), once, strict=1))


def one_step_again(model):
    model.norm.reset_running_stats()
    return one_step(model)


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
    return told, bits(model.had.grad) == bits(torch.tensor([1.5, -0.0]))


def generators():
    torch.manual_seed(9)
    random.seed(9)
    np.random.seed(9)  # noqa: NPY002  # the default generator is meant
    model = wrap_model(Net(), "exact")

    def drawing(model, batch):
        drawn = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002  # likewise
        return loss_fn(model, batch) * (1 + drawn)

    before = states()
    first, second = one_step(model, drawing), one_step_again(model)
    return first, second, before == states()


def states():
    numpy = np.random.get_state()[1].tolist()  # noqa: NPY002  # likewise
    return bits(torch.get_rng_state()), random.getstate(), numpy


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.whole = nn.BatchNorm1d(6, momentum=None)  # a cumulative average
        self.last = nn.Linear(6, 3)
        self.register_buffer("constant", torch.tensor([-0.0, math.nan, math.inf, 1 / 3]))
        self.register_buffer("turns", torch.tensor([1 - 2j]))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def forward(self, rows):
        if self.training:
            self.turns.mul_(1j)
            self.hidden += 0.1
        return self.last(self.whole(self.norm(rows)))


def buffers():
    model = seeded(Buffered)
    before = bits(model.constant)
    told = one_step(model)
    # What a single process computes with plain PyTorch: the mean over microbatches.
    torch.manual_seed(0)
    loader = make_loader(
        TensorDataset(*rows_of(22)), 22, shuffle=True, drop_last=False, seed=5, distributed=False
    )
    ((rows, _),) = loader
    parts = rows.split(4)
    mean = sum(len(part) / 22 * part.double().mean(0) for part in parts) * 0.1
    near = torch.allclose(model.norm.running_mean.double(), mean, rtol=1e-5, atol=1e-8)
    tracked = model.norm.num_batches_tracked.item()
    one_step(model)
    return (
        told,
        (bits(model.constant) == before, near, tracked),
        (model.norm.num_batches_tracked.item(), model.turns.tolist(), model.hidden.item()),
    )


def in_evaluation():
    model = seeded(Buffered).eval()
    before = fingerprint(model)
    return one_step(model), fingerprint(model) == before


def bucketed():
    """Buckets of 20 numbers: some are complete before the last gradient of a parameter comes."""
    told = [checkpointed(), tied(), unused()]
    before, _exact_sums._BUCKET = _exact_sums._BUCKET, 20
    try:
        return told == [checkpointed(), tied(), unused()], told
    finally:
        _exact_sums._BUCKET = before


def float64():
    model = seeded(Smooth, dtype=torch.float64)
    told = one_step(model, loader=steps(dtype=torch.float64))
    torch.manual_seed(0)
    net = Smooth().double()
    rows, targets = rows_of(22, torch.float64)
    F.cross_entropy(net(rows), targets).backward()
    worst = max(
        ((ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()).item()
        for ours, theirs in zip(unwrap(model).parameters(), net.parameters(), strict=True)
    )
    return told, worst < 1e-12


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, rows):
        return self.last(torch.tanh(self.first(rows)))


class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, rows):
        return (rows.to(torch.complex64) @ self.weight).abs() * self.scale


def complex_numbers():
    return one_step(seeded(Turning))


def several_steps():
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for batch in steps(50, 18):
        optimizer.zero_grad()
        losses.append(backward(model, loss_fn, batch).item())
        optimizer.step()
        check_in_sync(model)
    return losses, fingerprint(model)


class Exploding(nn.Module):
    """Its gradient is `factor` in the last microbatch, that of two rows."""

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


def overflowing():
    told = {}
    for factor in (math.inf, math.nan, 1e15):
        model = seeded(Exploding, factor)
        before = fingerprint(model)
        text = raised(one_step, model, mean_output)
        grads = [p.grad for p in model.parameters()]
        model.factor = 1.0
        told[str(factor)] = text, fingerprint(model) == before, grads, one_step(model, mean_output)
    model = seeded(Exploding, 1.0)

    def infinite(model, batch):
        return mean_output(model, batch) + (math.inf if len(batch[0]) == 2 else 0.0)

    told["loss"] = raised(one_step, model, infinite)

    def spoiling(model, batch):
        loss = mean_output(model, batch)
        unwrap(model).seen.fill_(math.nan)
        return loss

    told["buffer"] = raised(one_step, model, spoiling)
    return told


def skipping():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("pardata").addHandler(handler)
    model = seeded(Exploding, math.inf, on_overflow="skip")
    model.calm.grad = torch.full((3,), 7.0)
    before = fingerprint(model)
    one_step(model, mean_output)
    kept = model.calm.grad.tolist(), model.wild.grad, fingerprint(model) == before
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, mean_output)
    optimizer.step()
    untouched = fingerprint(model) == before
    logging.getLogger("pardata").removeHandler(handler)
    # That the loss itself is infinite is seen in what comes back.
    loss = one_step(model, lambda model, batch: mean_output(model, batch) * math.inf)["loss"]
    model.factor = 1.0
    told = one_step(model, mean_output)
    expected_lines = 2 if world().rank == 0 else 0
    says = all("skipped step 0: numbers must be finite" in line for line in lines)
    return kept, untouched, math.isnan(loss), told, len(lines) == expected_lines, says


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=True)

    def forward(self, rows):
        return self.table((rows[:, 0] > 0).long())


def sparse():
    return raised(one_step, seeded(Sparse))


def failing_on_one_rank():
    """An error of the user's on the last rank, in each place of its code."""
    is_last = world().rank == world().size - 1
    told = []
    model = seeded()

    def in_loss(model, batch):
        if is_last:
            message = "no such file"
            raise OSError(message)
        return loss_fn(model, batch)

    def after_some(model, batch):
        if is_last and len(batch[0]) == 2:
            message = "no such file"
            raise OSError(message)
        return loss_fn(model, batch)

    def no_loss(model, batch):
        return None if is_last else loss_fn(model, batch)

    def no_gradient(model, batch):
        return loss_fn(model, batch).detach() if is_last else loss_fn(model, batch)

    def without_model(model, batch):
        return torch.zeros((), requires_grad=True) if is_last else loss_fn(model, batch)

    for wrong in (in_loss, after_some, no_loss, no_gradient, without_model):
        before = fingerprint(model)
        text = raised(one_step, model, wrong)
        others = "RuntimeError: every rank must run its microbatches, but another one failed: see"
        told.append((text is not None, is_last or text.startswith(others)))
        told.append(fingerprint(model) == before)
        told.append(all(p.grad is None for p in model.parameters()))

    def miscount(microbatch):
        return -1 if is_last else 4

    text = raised(one_step, model, count=miscount)
    told.append("up, but returned -1" in text or "on 1 other rank(s)" in text)
    told.append("all its microbatches count 0" in raised(one_step, model, count=lambda _: 0))
    return told, one_step(model)


def at_other_steps():
    here = world()
    if here.size == 1:
        return True
    told = []
    model = seeded()
    loader = steps(40, 20)
    batches = list(loader)
    own = batches[1] if here.rank == here.size - 1 else batches[0]
    told.append(raised(backward, model, loss_fn, own))
    unwrap(model).first.requires_grad_(here.rank > 0)
    told.append(raised(backward, model, loss_fn, batches[0]))
    unwrap(model).first.requires_grad_(True)
    if here.rank == 0:
        unwrap(model).register_buffer("extra", torch.zeros(3))
    told.append(raised(backward, model, loss_fn, batches[0]))
    if here.rank == 0:
        del unwrap(model).extra
    text = "RuntimeError: every rank must be at the same step of the same loader and train the sa"
    assert all(p.grad is None for p in model.parameters())
    works = bool(backward(model, loss_fn, batches[0]) > 0)
    return works and all(line.startswith(text) for line in told)


SCENARIOS = [
    *(plain, autocast, low_precision, checkpointed, tied, ranks_without, counted, clipped),
    *(added_to, unused, generators, buffers, in_evaluation, bucketed, float64, complex_numbers),
    *(several_steps, overflowing, skipping, sparse, failing_on_one_rank, at_other_steps),
]


def every_scenario():
    return {scenario.__name__: told_by(scenario) for scenario in SCENARIOS}


def told_by(scenario):
    try:
        return scenario()
    except Exception:  # noqa: BLE001  # the others shall run
        return Broken(traceback.format_exc())


@dataclass(frozen=True)
class Broken:
    text: str


@functools.cache
def told_at(size):
    """Return what each scenario returns, by name, on each rank."""
    return run(every_scenario, world_size=size, timeout=200)


def told(name):
    return told_at(1)[0][name]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_step_leaves_the_same_bits_on_every_rank_at_every_size(scenario):
    name = scenario.__name__
    reference = told(name)
    for size in SIZES:
        for rank, facts in enumerate(told_at(size)):
            assert not isinstance(facts[name], Broken), f"{size} {rank} {facts[name].text}"
            assert repr(facts[name]) == repr(reference), (size, rank)  # NaN is equal to NaN


def test_a_bare_mean_of_microbatches_is_what_came_out():
    loss = told("plain")["loss"]
    assert told("checkpointed")["not"]["loss"] == pytest.approx(loss)


def test_checkpointing_changes_nothing_but_rounding_and_hooks_fire_several_times():
    first = told("checkpointed")
    assert first["not"] == told("plain")
    assert first["reentrant"]["loss bits"] == told("plain")["loss bits"]


def test_a_microbatch_that_counts_nothing_leaves_nothing_and_counters_advance_once():
    _, tracked, finite = told("counted")
    assert tracked == 1
    assert finite


def test_gradients_are_clipped_by_the_norm_of_the_global_one():
    norm, _ = told("clipped")
    assert norm > 0.01


def test_what_was_in_grad_is_counted_once():
    assert told("added_to")[1]


def test_a_parameter_that_no_microbatch_uses_keeps_its_grad():
    outcome, kept = told("unused")
    assert kept
    assert outcome["never.weight"] is None
    assert outcome["frozen.weight"] is None
    assert outcome["rarely.weight"] is not None


def test_generators_are_put_back():
    first, second, kept = told("generators")
    assert kept
    assert first["loss"] != second["loss"]


def test_buffers_are_the_mean_over_microbatches_counters_advance_once_constants_keep_their_bits():
    _, (constant, near, tracked), (later, turns, hidden) = told("buffers")
    assert constant
    assert near
    assert (tracked, later) == (1, 2)
    assert turns == [-1 + 2j]  # a quarter turn a step
    assert hidden == pytest.approx(0.2)


def test_in_evaluation_no_buffer_changes():
    assert told("in_evaluation")[1]


def test_the_size_of_buckets_does_not_show():
    assert told("bucketed")[0]


def test_in_float64_it_is_the_plain_gradient():
    assert told("float64")[1]


def test_overflow_is_named_with_its_value_and_leaves_all_as_it_was():
    outcomes = told("overflowing")
    for factor, shown in (("inf", "inf"), ("nan", "nan"), ("1000000000000000.0", "1e+15")):
        text, same, gradients, next_step = outcomes[factor]
        assert text.startswith("OverflowError: numbers must be finite and at most 2**46")
        assert f"the largest of the gradient of `wild` is {shown} (1 such)" in text
        assert "on_overflow='skip'" in text
        assert same
        assert gradients == [None, None]
        assert next_step["wild"] is not None
    assert "the largest of the loss is inf (1 such)" in outcomes["loss"]
    assert "the largest of the change of the buffer `seen` is nan" in outcomes["buffer"]


def test_a_step_that_overflows_is_skipped_if_told_so():
    (calm, wild, same), untouched, loss_is_nan, next_step, once, says = told("skipping")
    assert calm == [7.0] * 3
    assert wild is None
    assert same
    assert untouched
    assert loss_is_nan
    assert next_step["wild"] is not None
    assert once
    assert says


def test_a_sparse_gradient_is_refused_with_its_cure():
    text = told("sparse")
    assert text.startswith("TypeError: gradients must be dense under strategy 'exact', but that")
    assert "`table.weight` is sparse: make the embedding with sparse=False" in text


def test_an_error_on_one_rank_is_one_on_all_and_the_next_step_works():
    facts, _ = told("failing_on_one_rank")
    assert facts == [(True, True), True, True] * 5 + [True, True]


def test_ranks_at_other_steps_or_with_other_parameters_find_out():
    for size in SIZES[1:]:
        assert all(facts["at_other_steps"] for facts in told_at(size))


# By hand


def batch_of(batches, counts, first=0):
    return Microbatches(batches, epoch=0, step=0, first=first, counts=counts)


def test_how_a_step_is_cut_is_part_of_it_but_not_who_runs_it():
    rows, targets = rows_of(8)
    batches = [(rows[:4], targets[:4]), (rows[4:], targets[4:])]
    one = one_step(seeded(Smooth), loader=[batch_of(batches, [4, 4])])
    assert one["loss"] == pytest.approx(
        F.cross_entropy(unwrap(seeded(Smooth))(rows), targets).item(), rel=1e-6
    )


def test_a_loss_that_its_own_backward_needs_is_left_alone():
    # The backward of exp() looks at its result, which is the loss.
    model = seeded(Smooth, dtype=torch.float64)

    def exponential(model, batch):
        return model(batch[0]).mean().exp()

    one_step(model, exponential, steps(dtype=torch.float64))
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_gradients_of_microbatches_are_added_as_math_fsum_does():
    model = seeded(Smooth, dtype=torch.float64)
    rows, targets = rows_of(40, torch.float64)
    singles = []
    for row, target in zip(rows, targets, strict=True):
        net = Smooth().double()
        net.load_state_dict(unwrap(model).state_dict())
        F.cross_entropy(net(row[None]), target[None]).backward()
        singles.append(net.last.bias.grad.tolist())
    batches = [(row[None], target[None]) for row, target in zip(rows, targets, strict=True)]
    one_step(model, loader=[batch_of(batches, [1] * 40)])
    for ours, many in zip(model.last.bias.grad.tolist(), zip(*singles, strict=True), strict=True):
        assert ours == pytest.approx(math.fsum(many) / 40, rel=1e-14, abs=1e-18)
