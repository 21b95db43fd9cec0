"""What a step under "exact_fsdp" refuses, and that it leaves everything as it was.

The bits: test_exact_step.py, and promises/test_exact_fsdp.py.
"""

import contextlib
import functools
import warnings

import pytest
import torch
from on_ranks import Raised, caught, run
from sharding import needs_exact_fsdp, whole
from torch import nn, optim
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from pardata import backward, fingerprint, load_weights, make_loader, unwrap, wrap_model
from pardata.strategies.exact._elementwise import _mixes, refuse_mixing_optimizers

pytestmark = needs_exact_fsdp


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows):
        self.seen += 1
        return rows + torch.tanh(self.layer(rows))


class Blocks(nn.Module):
    """Three blocks, run by `through`, of which the first is run once more where `again`."""

    def __init__(self, through=lambda block, rows: block(rows), *, again=False):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(3)), nn.Linear(6, 3)
        self.through, self.again = through, again

    def forward(self, rows):
        for block in (*self.blocks, *self.blocks[: int(self.again)]):
            rows = self.through(block, rows)
        return self.last(rows)


def seeded(strategy="exact_fsdp", *args, blocks="auto", **options):
    torch.manual_seed(0)
    sharding = {"blocks": blocks} if strategy == "exact_fsdp" and blocks else {}
    return wrap_model(Blocks(*args, **options), strategy, **sharding)


def loader(*, strided=True, **options):
    rows = torch.randn(22, 6, generator=torch.Generator().manual_seed(1))
    how = {"microbatch_size": 4, "drop_last": False, "seed": 5, "num_workers": 0, **options}
    return make_loader(TensorDataset(rows), 22, strided=strided, **how)


def loss_fn(model, batch):
    return model(batch[0]).square().mean()


def step(model, loss=loss_fn, **options):
    (batch,) = loader(**options)
    return backward(model, loss, batch)


def gradients(model):
    return [None if p.grad is None else whole(p.grad).tolist() for p in model.parameters()]


def left(model, *args, **options):
    """Return what a step leaves: the loss, gradients and buffers."""
    model.zero_grad()
    for block in unwrap(model).blocks:
        block.seen.zero_()
    loss = step(model, *args, **options)
    return loss.item(), gradients(model), [b.tolist() for b in model.buffers()]


def expected(*args, **options):
    (told,) = run(left_by_exact, args, options, world_size=1)
    return told


def left_by_exact(args, options):
    return left(seeded("exact", *args, **options))


# --- errors, in their order, after each of which the next step is right


def bare(model):
    (batch,) = loader()
    loss_fn(model, batch[0]).backward()


def of_parameters_alone(model, batch):
    model(batch[0])
    return unwrap(model).last.weight.square().sum()  # whose root is not sharded again


def freezing(model, batch):
    unwrap(model).last.weight.requires_grad_(requires_grad=False)
    return loss_fn(model, batch)


def failing_in_backward(model, batch):
    loss = loss_fn(model, batch)
    loss.register_hook(lambda _: 1 / 0)
    return loss


class FailOnRecompileLimitHit(Exception):  # noqa: N818  # as dynamo's
    pass


def compiled_too_often(model, batch):
    loss_fn(model, batch)
    raise FailOnRecompileLimitHit


ONCE = (
    "RuntimeError: a part of the model must run backward once in a microbatch under strategy "
    "'exact_fsdp', but that with `blocks.0.layer.weight` did so again: leave what runs several "
    "times out of `blocks`, and pass use_reentrant=False to checkpoint"
)
CHANGED = (
    "RuntimeError: what is trained must not change within a step under strategy 'exact_fsdp', but "
    "parameters were frozen, or no longer so, since it began: call requires_grad_() before backward"
)
ALONE = (
    "RuntimeError: the loss must depend on what the model returns under strategy 'exact_fsdp', but "
    "`last.weight` got a gradient from a loss that does not: compute what is made of parameters "
    "alone in the model's forward"
)
FAILING = {
    "alone": (of_parameters_alone, ALONE),
    "freezing": (freezing, CHANGED),
    "backward": (failing_in_backward, "ZeroDivisionError: division by zero"),
    "compiler": (compiled_too_often, "RuntimeError: a compiled model must be compiled for each"),
}


def text_of(fn, *args, **options):
    found = caught(functools.partial(fn, *args, **options))
    return f"{found.type}: {found.text}" if isinstance(found, Raised) else found


def failures():
    """Return what each failure says, and whether it has left all as it was."""
    warnings.simplefilter("ignore")  # FSDP's own, of views
    model, told = seeded(), {}
    first = left(model)
    for name, (loss, _) in FAILING.items():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = fingerprint(model)
        text = text_of(step, model, loss)
        kept = all((whole(p.grad) == 1).all() for p in model.parameters())
        unwrap(model).last.weight.requires_grad_(requires_grad=True)
        told[name] = text, kept and fingerprint(model) == before, left(model) == first
    model.zero_grad()
    text = text_of(bare, model)
    told["bare"] = text, gradients(model) == [None] * 8, left(model) == first
    with torch.no_grad():
        assert model(torch.ones(2, 6)).shape == (2, 3)
    unwrap(model).last.requires_grad_(requires_grad=False)
    return told, first, [g is None for g in left(model)[1]]


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_that_fails_leaves_gradients_buffers_and_what_fsdp_keeps(size):
    reference = expected()
    for told, first, is_none in run(failures, world_size=size, timeout=120):
        assert first == reference
        for name, (_, text) in FAILING.items():
            assert told[name][0].startswith(text), told[name]
        assert "only `pardata.backward` must run a backward, but parameters got" in told["bare"][0]
        assert {entry[1:] for entry in told.values()} == {(True, True)}, told
        assert is_none == [False] * 6 + [True] * 2  # what is frozen between steps


def of_blocks_that_run_twice():
    model = seeded(again=True)
    first = text_of(step, model)
    return first, gradients(model), left(seeded(again=True, blocks=None))


def test_a_block_that_runs_twice_is_refused_and_trained_if_it_is_no_block():
    reference = expected(again=True)
    for text, none, told in run(of_blocks_that_run_twice, world_size=2, timeout=120):
        assert (text, none) == (ONCE, [None] * 8)
        assert told == reference


REENTRANT = functools.partial(checkpoint, use_reentrant=True)
KEPT = functools.partial(checkpoint, use_reentrant=False)


def checkpointed():
    return [left(seeded("exact_fsdp", through)) for through in (KEPT, REENTRANT)]


def test_blocks_may_be_checkpointed():
    reference = [expected(through) for through in (KEPT, REENTRANT)]
    assert run(checkpointed, world_size=2, timeout=120) == [reference] * 2


def refused_shares():
    model, replicated = seeded(), seeded("exact")
    return text_of(step, model, strided=False), text_of(step, replicated)


def test_each_exact_strategy_says_which_shares_it_needs():
    for sharded, replicated in run(refused_shares, world_size=2):
        assert sharded == (
            "ValueError: `batch` must hold strided microbatches under strategy 'exact_fsdp', but "
            "holds a run of them: pass strided=True to make_loader, or to Microbatches.of"
        )
        assert replicated == (
            "ValueError: `batch` must hold a run of microbatches under strategy 'exact', but is "
            "strided: leave out strided=True where it is made, or wrap with 'exact_fsdp'"
        )
    assert run(refused_shares, world_size=1)[0][0] == expected()[0]  # one has all


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.turns = nn.Parameter(torch.arange(15.0).view(5, 3) * (0.1 + 0.2j))
        self.spare = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def forward(self, rows):
        return (self.turns.abs() * rows[:5, :3].mean()).sum()


def of_complex_numbers(strategy):
    model = wrap_model(Complex(), strategy)
    step(model, lambda model, batch: model(batch[0]), strided=strategy == "exact_fsdp")
    return [None if p.grad is None else str(whole(p.grad)) for p in model.parameters()]


def test_complex_gradients_are_added_as_pairs():
    reference = run(of_complex_numbers, "exact", world_size=1)
    for size in (2, 3):
        assert run(of_complex_numbers, "exact_fsdp", world_size=size) == reference * size


# --- wrapping, and weights


@contextlib.contextmanager
def an_older_torch():
    name = "set_reduce_scatter_unused_params"
    method = getattr(FSDPModule, name)
    delattr(FSDPModule, name)
    try:
        yield
    finally:
        setattr(FSDPModule, name, method)


def with_an_older_torch():
    with an_older_torch():
        return text_of(lambda: type(seeded()).__name__)


def test_an_older_torch_is_an_error_that_says_since_when_but_in_one_process():
    for text in run(with_an_older_torch, world_size=2):
        assert text == (
            f"RuntimeError: strategy 'exact_fsdp' on several ranks needs torch 2.13, whose "
            f"fully_shard takes another reduction, but this is {torch.__version__}: install a "
            f"newer one, or use 'exact'"
        )
    assert run(with_an_older_torch, world_size=1) == ["ExactModel"]


def with_other_kernels():
    model = seeded()
    state = model.state_dict()
    same = text_of(model.load_state_dict, state), text_of(load_weights, model, state)
    state._metadata[""]["exact"]["torch"] = "1.0"
    return same, [text_of(load, state) for load in (model.load_state_dict, unwrap_into(model))]


def unwrap_into(model):
    return functools.partial(load_weights, model)


def test_the_kernels_are_recorded_and_compared_as_under_exact():
    for same, others in run(with_other_kernels, world_size=2):
        assert same == (([], []), ([], []))
        for text in others:
            assert "must keep the kernels that it began with, but torch was '1.0' and is" in text


# --- optimizers

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda p: optim.Adam(p, lr=0.0),  # as at the begin of a warm-up
    "AdamW": lambda p: optim.AdamW(p, foreach=True),
    "Muon": lambda p: optim.Muon(p, lr=0.1),
    "Adafactor": optim.Adafactor,
    "LBFGS": optim.LBFGS,  # needs a closure: cannot be tried
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_that_looks_at_more_than_an_element_is_seen(name):
    net = nn.Linear(3, 3, bias=False)
    optimizer = OPTIMIZERS[name](net.parameters())
    (group,) = optimizer.param_groups
    before = [p.clone() for p in net.parameters()]
    assert _mixes(optimizer, group, net.weight) is (name in ("Muon", "Adafactor"))
    assert not optimizer.state
    assert all(map(torch.equal, net.parameters(), before))


def test_its_first_step_is_an_error_and_that_of_others_is_not():
    net, other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    refuse_mixing_optimizers(net)
    for module, kind in ((net, optim.SGD), (other, optim.Muon)):
        optimizer = kind(module.parameters(), lr=0.1)
        module.weight.grad = torch.ones(3, 3)
        optimizer.step()
    net.weight.grad = torch.ones(3, 3)
    with pytest.raises(RuntimeError, match="but Muon gives a part other bits than the whole: pass"):
        optim.Muon(net.parameters(), lr=0.1).step()
