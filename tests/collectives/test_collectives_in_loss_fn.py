"""Collectives inside `loss_fn`: with microbatches they are an error on every rank, at any size."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from on_ranks import caught, run
from torch import nn
from torch.utils.data import TensorDataset

import pardata
from pardata import (
    all_gather,
    all_reduce_sum,
    backward,
    make_loader,
    rank_zero_call,
    world,
    wrap_model,
)

REDUCTIONS = [f"all_reduce_{name}" for name in ("max", "mean", "min", "sum")]
CALLS = ["all_gather", "broadcast", *REDUCTIONS]


def losses(loss_fn, microbatch_size, strategy="auto"):
    """Train on 12 samples in one global batch, and return the loss."""
    torch.manual_seed(0)
    model = wrap_model(nn.Linear(4, 2).double(), strategy)
    rows = torch.arange(48.0, dtype=torch.float64).sin().view(12, 4)
    loader = make_loader(TensorDataset(rows), 12, microbatch_size=microbatch_size, seed=0)
    return [backward(model, loss_fn, batch).item() for batch in loader]


def calling(name, model, batch):
    loss = model(batch[0]).square().mean()
    getattr(pardata, name)(*([] if name == "barrier" else [loss.detach()]))
    return loss


def errors(microbatch_size, strategy):
    calls = CALLS if world().size == 1 else [*CALLS, "barrier"]
    found = [str(caught(losses, partial(calling, c), microbatch_size, strategy)) for c in calls]
    assert all_reduce_sum(1) == world().size  # the group is usable, and nothing stays forbidden
    return found


@pytest.mark.parametrize("strategy", ["auto", "exact"])
@pytest.mark.parametrize("size", [1, 3])
def test_a_reduction_in_loss_fn_with_microbatches_is_an_error(size, strategy):
    for microbatch_size in (4, 12):
        for found in run(errors, microbatch_size, strategy, world_size=size):
            calls = [f"`{call}`" for call in CALLS] + ["`barrier()`"] * (size > 1)
            for call, error in zip(calls, found, strict=True):
                assert f"{call} must not be called in `loss_fn` with Micro" in error


def read_on_rank_0():
    rows = TensorDataset(torch.arange(12))
    return rank_zero_call(lambda: len(list(make_loader(rows, 4, distributed=False))))


def test_a_loader_without_collectives_can_be_read_on_rank_0():
    assert run(read_on_rank_0) == [3, 3]


def test_without_microbatches_it_is_not():
    for call in CALLS:
        first, second = run(losses, partial(calling, call), None)
        assert first == second


def gathering(model, batch):
    return torch.cat(all_gather(model(batch[0]), differentiable=True)).square().mean()


def test_a_differentiable_gather_of_partial_batches_raises():
    for error in run(caught, losses, gathering, 6):
        assert "`all_gather` must not be called" in str(error)
    (alone,) = run(losses, gathering, None, world_size=1)
    for found in run(losses, gathering, None):
        assert found == pytest.approx(alone)


def counting(model, batch):
    """Return a loss that a bare collective divides, as the losses of detection do."""
    loss = model(batch[0]).square().mean(1)
    number = torch.tensor([float(len(loss))])
    dist.all_reduce(number)
    return loss.sum() / number.item()


@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_a_bare_collective_needs_them_too(strategy):
    """Where ranks run unequally many, gloo would end the process."""
    for microbatch_size, number in ((4, 3), (12, 1)):  # of one, a rank runs a placeholder
        for error in run(caught, losses, counting, microbatch_size, strategy):
            assert f"here {number} on 2 ranks: return metrics" in str(error)
    for found in run(losses, counting, 6, strategy):
        assert len(found) == 1


def steps_of(model, loss_fn):
    """Train for an epoch of which the last step alone is uneven; return what each step raised."""
    loader = make_loader(TensorDataset(torch.ones(10, 4)), 4, microbatch_size=2, seed=0)
    return [str(caught(backward, model, loss_fn, batch)) for batch in loader]


def uneven_at_the_end():
    steps = steps_of(wrap_model(nn.Linear(4, 2), "ddp"), counting)
    assert all_reduce_sum(1) == world().size
    return steps


def test_it_is_told_also_where_only_the_last_step_is_uneven():
    for first, second, last in run(uneven_at_the_end):
        assert "RuntimeError" not in first + second
        assert "here 1 on 2 ranks: return metrics" in last


def steps_after_one_by_hand():
    """Train on, where DDP arranges its buckets anew in a step, and the last step is uneven."""
    model = wrap_model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), "ddp")
    model(torch.ones(2, 4)).square().mean().backward()
    said = steps_of(model, lambda model, batch: model(batch[0]).square().mean())
    return model._has_rebuilt_buckets, "Error" in "".join(said)


def test_ddp_may_rebuild_its_buckets_in_a_forward():
    assert run(steps_after_one_by_hand) == [(True, False)] * 2
