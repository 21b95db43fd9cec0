"""Buffers: put back after what must leave no trace, and made equal on all ranks under "fsdp"."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from on_ranks import run
from torch import nn

from pardata.model._buffers import EqualBuffers, _parts_of, average, kept_buffers

SIZES = [1, 2, 3, 4]


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

    def forward(self, rows):
        return self.norm(rows)


# --- put back ---


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
        with kept_buffers(module):
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


def test_a_backward_may_still_need_buffers_that_are_put_back():
    module = nn.BatchNorm1d(2)
    rows = torch.randn(4, 2)
    with kept_buffers(module):
        output = module(rows)
    output.sum().backward()
    assert module.weight.grad is not None
    assert torch.equal(module.running_mean, torch.zeros(2))


# --- the mean over the ranks ---


def _averaged(weights):
    rank = dist.get_rank()
    shares = [weight / sum(weights) for weight in weights]
    module = Many().double()
    module.short = module.short.to(torch.bfloat16)
    module.norm.running_mean.fill_(rank + 1)
    module.norm.running_var.fill_(torch.nan if weights[rank] == 0 else 2.0)
    module.norm.num_batches_tracked.fill_(10 + rank)
    module.short.fill_(rank)
    module.angles = torch.full((2,), complex(rank, -rank))
    module.mask.fill_(rank == 0)
    average(_parts_of(module), shares[rank])
    return state(module)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["even", "uneven", "none on the last"])
def test_floating_buffers_become_the_weighted_mean_and_others_those_of_rank_0(kind, size):
    weights = {
        "even": [1] * size,
        "uneven": [7, 1, 3, 100][:size],
        "none on the last": [*[2, 1, 3, 1][: size - 1], 0 if size > 1 else 1],
    }[kind]
    mean = sum(weight * rank for rank, weight in enumerate(weights)) / sum(weights)
    for found in run(_averaged, weights, world_size=size):
        torch.testing.assert_close(found["norm.running_mean"], torch.full((2,), mean + 1).double())
        assert found["norm.running_var"].tolist() == pytest.approx([2.0, 2.0], rel=1e-15)
        assert found["norm.num_batches_tracked"] == 10
        assert found["short"].dtype == torch.bfloat16
        assert torch.equal(found["short"], torch.full((2,), mean).bfloat16())
        assert found["angles"].dtype == torch.complex64
        torch.testing.assert_close(found["angles"], torch.full((2,), complex(mean, -mean)))
        assert found["hash"].tolist() == [2**62 + 1, -3]  # beyond what a float64 can tell apart
        assert found["mask"].tolist() == [True, True]


def _constants():
    torch.manual_seed(0)
    module = nn.Module()
    module.register_buffer("positions", torch.randn(1000))
    module.register_buffer("bias", torch.tensor([0.0, -torch.inf, 3e38, 1e-45]))
    before = state(module)
    share = [0.1, 0.7, 0.2][dist.get_rank()]
    for _ in range(20):
        average([buffer.data for buffer in module.buffers()], share)
    return all(torch.equal(before[name], now) for name, now in state(module).items())


def test_what_is_the_same_on_all_ranks_stays_what_it_is():
    assert run(_constants, world_size=3) == [True] * 3


def _none_at_all():
    average([], 0.5)
    average([torch.tensor([dist.get_rank()])], 0.5)
    return True


def test_modules_without_floating_buffers_or_without_any_are_fine():
    assert run(_none_at_all, world_size=2) == [True, True]


# --- the hook ---


def _hooked():
    rank = dist.get_rank()
    module = Many()
    hook = EqualBuffers()
    plain = nn.Linear(1, 1)
    module.register_forward_hook(hook)
    rows = torch.full((4, 2), float(rank)) + torch.arange(4.0).view(4, 1)

    def means():
        return module.norm.running_mean[0].item()

    found = {"found": (EqualBuffers.of(module) is hook, EqualBuffers.of(plain))}
    with torch.no_grad():
        module(rows)  # a forward without gradients never communicates
    found["no grad"] = means()
    module.eval()(rows)
    found["eval"] = means()
    module.train()(rows)
    found["train"] = means()
    module.norm.running_mean.zero_()
    with hook.averaged(module, lambda: [0.25, 0.75][rank]):
        module(rows)
        found["within"] = means()
    found["after"] = means()
    try:
        with hook.averaged(module, lambda: 1 // 0):
            raise KeyError
    except KeyError:
        module(rows)
    found["again"] = means()
    module.eval()
    module.norm.running_mean.fill_(rank)
    with hook.averaged(module, lambda: 0.5):
        pass
    found["averaged in eval"] = means()
    return found


def test_the_hook_broadcasts_after_each_training_forward_or_averages_once():
    one, other = run(_hooked, world_size=2)
    for found in (one, other):
        assert found["found"] == (True, None)
    # Rank r's rows have the mean 1.5 + r; the momentum is 0.1.
    assert (one["no grad"], other["no grad"]) == pytest.approx((0.15, 0.25))
    assert (one["eval"], other["eval"]) == pytest.approx((0.15, 0.25))
    assert one["train"] == other["train"] == pytest.approx(0.9 * 0.15 + 0.15)
    assert (one["within"], other["within"]) == pytest.approx((0.15, 0.25))
    assert one["after"] == other["after"] == pytest.approx(0.25 * 0.15 + 0.75 * 0.25)
    assert one["again"] == other["again"]  # after an error it broadcasts again
    assert (one["averaged in eval"], other["averaged in eval"]) == (0, 1)
