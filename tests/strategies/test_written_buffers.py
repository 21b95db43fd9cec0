"""A floating-point buffer that a forward changes, and that no norm owns, is told."""

from functools import partial

import pytest
import torch
from logged import log_of
from on_ranks import caught, run
from torch import nn

from pardata import backward, make_loader, unwrap, wrap_model

TEXT = "but has changed `bank.{}`"


class Bank(nn.Module):
    """Keeps what it has seen in the ways that there are."""

    def __init__(self, how):
        super().__init__()
        self.how, self.layer = how, nn.Linear(1, 1)
        self.norm = nn.BatchNorm1d(1)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(1, 1))
        self.register_buffer("queue", torch.zeros(16))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        if self.how == "queue":
            self.queue[:1] = x[0].detach()
        elif self.how == "center":
            self.queue = self.queue * 0.9 + x.detach().mean()
        elif self.how == "cache":
            self.cache.copy_(x[:1, 0].detach().expand(2))
        self.at += 1
        return self.spectral(self.norm(self.layer(x)))


class Net(nn.Module):
    def __init__(self, how, *, allows=False):
        super().__init__()
        self.bank = Bank(how)
        if allows:
            self.bank.forward_updates_buffers = True

    def forward(self, x):
        return self.bank(x)


def told(strategy, how, microbatch_size, *, allows=False):
    """Return the lines about buffers in two steps, and the errors."""
    model = wrap_model(Net(how, allows=allows), strategy)
    before = unwrap(model).bank.queue.clone()
    with log_of() as log:
        errors = []
        for x in make_loader(torch.arange(16.0)[:, None], 8, microbatch_size=microbatch_size):
            error = caught(backward, model, lambda m, b: m(b).square().mean(), x)
            errors.append(getattr(error, "text", ""))
        lines = [line for line in log.lines if "floating-point buffer" in line]
    kept = torch.equal(unwrap(model).bank.queue, before)
    return lines, errors, kept, all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("how", ["queue", "center", "cache"])
def test_exact_raises_for_a_buffer_that_a_forward_changes(how, size):
    name = "cache" if how == "cache" else "queue"
    for lines, errors, kept, clean in run(told, "exact", how, 2, world_size=size):
        assert not lines
        for error in errors:
            assert TEXT.format(name) in error
        assert kept
        assert clean


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("how", ["queue", "center"])
def test_other_strategies_warn_once_of_such_a_buffer(strategy, how, size):
    for lines, errors, _, _ in run(told, strategy, how, 2, world_size=size, fresh=True):
        assert len(lines) == 1
        assert TEXT.format("queue") in lines[0]
        assert errors == ["", ""]


def test_one_process_that_runs_a_batch_at_once_is_not_warned():
    assert run(told, "none", "queue", None, world_size=1)[0][0] == []
    assert len(run(told, "none", "queue", 4, world_size=1, fresh=True)[0][0]) == 1


@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_norms_integers_and_modules_that_say_so_are_let_alone(strategy):
    for how, allows in (("", False), ("queue", True)):
        for lines, errors, *_ in run(partial(told, allows=allows), strategy, how, 2):
            assert (lines, errors) == ([], ["", ""])
