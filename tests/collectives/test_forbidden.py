"""Collectives inside `loss_fn`: with microbatches they are an error on every rank, at any size."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import caught, run
from torch import nn
from torch.utils.data import TensorDataset

from pardata import (
    all_gather,
    all_reduce_max,
    all_reduce_mean,
    all_reduce_min,
    all_reduce_sum,
    backward,
    broadcast,
    make_loader,
    world,
    wrap_model,
)

CALLS = (all_gather, all_reduce_max, all_reduce_mean, all_reduce_min, all_reduce_sum, broadcast)


def losses(loss_fn, microbatch_size, strategy="auto", epochs=1):
    """Train on 12 samples in global batches of 12, and return the losses."""
    torch.manual_seed(0)
    model = wrap_model(nn.Linear(4, 2).double(), strategy)
    rows = torch.arange(48.0, dtype=torch.float64).sin().view(12, 4)
    loader = make_loader(TensorDataset(rows), 12, microbatch_size=microbatch_size, seed=0)
    return [backward(model, loss_fn, batch).item() for _ in range(epochs) for batch in loader]


def calling(call):
    def loss_fn(model, batch):
        loss = model(batch[0]).square().mean()
        call(loss.detach())
        return loss

    return loss_fn


def errors(size_of_microbatches, strategy):
    found = [caught(losses, calling(call), size_of_microbatches, strategy) for call in CALLS]
    assert all_reduce_sum(1) == world().size  # the group is usable, and nothing stays forbidden
    return [f"{error}" for error in found]


@pytest.mark.parametrize("strategy", ["auto", "exact"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_reduction_in_loss_fn_with_microbatches_is_an_error(size, strategy):
    for microbatch_size in (4, 12):
        for found in run(errors, microbatch_size, strategy, world_size=size):
            for call, error in zip(CALLS, found, strict=True):
                assert f"`{call.__name__}` must not be called in `loss_fn` with Micro" in error


def test_without_microbatches_it_is_not():
    for call in CALLS:
        assert run(losses, Calling(call), None)[0] == run(losses, Calling(call), None)[1]


class Calling:
    """A `loss_fn` that can be pickled."""

    def __init__(self, call):
        self.call = call

    def __call__(self, model, batch):
        return calling(self.call)(model, batch)


def gathering(model, batch):
    return torch.cat(all_gather(model(batch[0]), differentiable=True)).square().mean()


def test_a_differentiable_gather_needs_equally_many_microbatches_on_all_ranks():
    (alone,) = run(losses, gathering, 6, world_size=1)
    for found in run(losses, gathering, 6):
        assert found == pytest.approx(alone)
    for error in run(caught, losses, gathering, 4):
        assert "`all_gather` must not be called" in str(error)


def counting(model, batch):
    """Return a loss that a bare collective divides, as the losses of detection do."""
    loss = model(batch[0]).square().mean(1)
    number = torch.tensor([float(len(loss))])
    if dist.is_initialized():
        dist.all_reduce(number)
    return loss.sum() / number.item()


@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_a_bare_collective_needs_them_too(strategy):
    """Where ranks run unequally many, gloo would end the process."""
    for error in run(caught, losses, counting, 4, strategy):
        assert "2 ranks share 3 microbatches" in str(error)
    for error in run(caught, losses, counting, 12, strategy):  # one rank runs a placeholder
        assert "2 ranks share 1 microbatches" in str(error)
    for found in run(losses, counting, 6, strategy):
        assert len(found) == 1


def uneven_at_the_end():
    """Return the error of an epoch's last step, which alone is uneven."""
    model = wrap_model(nn.Linear(4, 2), "ddp")
    loader = make_loader(TensorDataset(torch.ones(10, 4)), 4, microbatch_size=2, seed=0)
    steps = [str(caught(backward, model, counting, batch)) for batch in loader]
    assert all_reduce_sum(1) == world().size
    return steps


def test_it_is_told_also_where_only_the_last_step_is_uneven():
    for first, second, last in run(uneven_at_the_end):
        assert "RuntimeError" not in first + second
        assert "2 ranks share 1 microbatches" in last


def steps_after_one_by_hand():
    """Train on, where DDP arranges its buckets anew in a step, and the last step is uneven."""
    model = wrap_model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), "ddp")
    model(torch.ones(2, 4)).square().mean().backward()
    loader = make_loader(TensorDataset(torch.ones(10, 4)), 4, microbatch_size=2, seed=0)
    for batch in loader:
        backward(model, lambda model, batch: model(batch[0]).square().mean(), batch)
    return model._has_rebuilt_buckets


def test_what_ddp_itself_sends_in_a_forward_is_no_call_of_the_loss_fn():
    assert run(steps_after_one_by_hand) == [True, True]
