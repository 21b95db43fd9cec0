"""Buffers: put back after what must leave no trace, and made equal on all ranks under "fsdp".

The hook of "fsdp" works in `backward`: tests/strategies/test_backward.py.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from common_models import batch, seeded
from on_ranks import run
from torch import nn

from pardata import backward, unwrap, wrap_model
from pardata.model._grads_and_buffers import BufferSnapshot, real_buffers
from pardata.strategies._fsdp import average_buffers


class Many(nn.Module):
    """Holds buffers of every kind."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("angles", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("hash", torch.tensor([2**62 + 1, -3]))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", None)
        self.register_buffer("short", torch.ones(2, dtype=torch.bfloat16), persistent=False)


def change_all(module):
    module.norm(torch.randn(5, 2))
    module.angles.mul_(2)
    module.mask = ~module.mask  # another tensor
    module.hash = torch.cat([module.hash, module.hash])  # of another shape
    module.cache = torch.ones(7)  # where there was none
    module.register_buffer("more", torch.ones(1))
    del module.short


def state(module):
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


@pytest.mark.parametrize("fails", [False, True])
def test_whatever_was_done_to_buffers_is_undone(fails):
    module = Many()
    held, before = dict(module.named_buffers()), state(module)
    with pytest.raises(KeyError) if fails else nullcontext():  # noqa: SIM117
        with BufferSnapshot(module.modules()):
            change_all(module)
            if fails:
                raise KeyError
    after = dict(module.named_buffers())
    assert list(after) == list(before)
    for name, buffer in after.items():
        assert buffer is held[name]
        assert torch.equal(buffer, before[name])
    assert module.cache is None
    assert not hasattr(module, "more")


def averaged(weights):
    rank = dist.get_rank()
    module = Many().double()
    module.short = module.short.to(torch.bfloat16)
    module.norm.running_mean.fill_(rank + 1)
    module.norm.running_var.fill_(torch.nan if weights[rank] == 0 else 2.0)
    module.norm.num_batches_tracked.fill_(10 + rank)
    module.short.fill_(rank)
    module.angles = torch.full((2,), complex(rank, -rank))
    module.mask.fill_(rank == 0)
    average_buffers(real_buffers(module).values(), weights[rank], sum(weights))
    average_buffers([], 1, 2)
    average_buffers([torch.tensor([rank])], 1, 2)
    return state(module)


@pytest.mark.parametrize("weights", [[1], [7, 1, 3], [2, 1, 0]])
def test_floating_buffers_become_the_weighted_mean_and_others_those_of_rank_0(weights):
    mean = sum(weight * rank for rank, weight in enumerate(weights)) / sum(weights)
    for found in run(averaged, weights, world_size=len(weights)):
        torch.testing.assert_close(found["norm.running_mean"], torch.full((2,), mean + 1).double())
        assert found["norm.running_var"].tolist() == pytest.approx([2.0, 2.0], rel=1e-15)
        assert found["norm.num_batches_tracked"] == 10
        assert found["short"].dtype == torch.bfloat16
        assert torch.equal(found["short"], torch.full((2,), mean).bfloat16())
        assert found["angles"].dtype == torch.complex64
        torch.testing.assert_close(found["angles"], torch.full((2,), complex(mean, -mean)))
        assert found["hash"].tolist() == [2**62 + 1, -3]  # beyond what a float64 can tell apart
        assert found["mask"].tolist() == [True, True]


def constants():
    torch.manual_seed(0)
    module = nn.Module()
    module.register_buffer("positions", torch.randn(1000))
    module.register_buffer("bias", torch.tensor([0.0, -torch.inf, 3e38, 1e-45]))
    before = state(module)
    for _ in range(20):
        average_buffers(
            [buffer.data for buffer in module.buffers()], [1, 7, 2][dist.get_rank()], 10
        )
    assert all(torch.equal(before[name], now) for name, now in state(module).items())


def test_what_is_the_same_on_all_ranks_stays_what_it_is():
    run(constants, world_size=3)


def fails(model, rows):
    model(rows)
    raise KeyError


def sharded():
    """Return whether the mean of a batch norm differs after each of several forwards."""
    model = wrap_model(seeded(), "fsdp")
    rows, norm = batch(seed=dist.get_rank()), unwrap(model).norm

    def differs():
        norm.running_mean.fill_(dist.get_rank())
        model(rows)
        means = [torch.zeros(8) for _ in range(2)]
        dist.all_gather(means, norm.running_mean)
        return not torch.equal(*means)

    with torch.no_grad():
        found = [differs()]  # a forward without gradients never communicates
    model.eval()
    found.append(differs())
    model.train()
    found.append(differs())
    with pytest.raises(KeyError):
        backward(model, fails, rows)
    return [*found, differs()]  # after an error it broadcasts again


def test_under_fsdp_buffers_are_broadcast_after_each_training_forward():
    assert run(sharded, world_size=2) == [[True, True, False, False]] * 2
