"""Buffers of an exact step: every microbatch begins from the same, and the mean is kept."""

import math
import re

import pytest
import torch
from torch import nn

from pardata.gradient import _fixed_point
from pardata.gradient._exact_buffers import Buffers
from pardata.gradient._exact_report import Largest

CPU = torch.device("cpu")


class Holder(nn.Module):
    def __init__(self, **buffers):
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def step(module, *microbatches):
    """Run a step of microbatches, each a weight and the values that it leaves in the buffers."""
    buffers = Buffers(module, CPU)
    seen = Largest(buffers.floating, CPU)
    is_first = True
    for weight, left in microbatches:
        buffers.restore()
        for name, tensor in left.items():
            getattr(module, name).copy_(tensor)
        buffers.take(weight, seen, is_first=is_first and weight > 0)
        is_first = is_first and weight == 0
        seen.end()
    buffers.apply()
    return buffers, seen


def bits(tensor):
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_floating_point_ones_become_the_weighted_mean(dtype):
    module = Holder(mean=torch.tensor([1.0, 2.0], dtype=dtype))
    left = [torch.tensor([2.0, 2.0]), torch.tensor([4.0, -6.0])]
    step(module, (0.25, {"mean": left[0]}), (0.75, {"mean": left[1]}))
    assert module.mean.tolist() == [3.5, -4.0]
    assert module.mean.dtype == dtype


def test_complex_ones_are_averaged_like_two():
    start = torch.tensor([[1 + 2j, 0.5 - 0.25j]])
    module = Holder(turns=start.clone(), kept=start.clone())
    step(module, (0.5, {"turns": start + 1}), (0.5, {"turns": start - 3j}))
    assert torch.equal(module.turns, start + 0.5 - 1.5j)
    assert torch.equal(module.kept, start)


def test_what_counts_becomes_what_the_first_microbatch_with_a_weight_leaves():
    module = Holder(steps=torch.tensor(7), flags=torch.tensor([True, False]), x=torch.zeros(2))
    left = {"steps": torch.tensor(8), "flags": torch.tensor([False, True])}
    nothing = {"steps": torch.tensor(70), "flags": torch.tensor([True, True])}
    step(module, (0.0, nothing), (0.5, left), (0.5, {"steps": torch.tensor(9)}))
    assert module.steps == 8
    assert module.flags.tolist() == [False, True]


def test_a_microbatch_without_weight_leaves_nothing():
    module = Holder(mean=torch.ones(2))
    _, seen = step(module, (1.0, {"mean": torch.full((2,), 3.0)}), (0.0, {"mean": math.nan}))
    assert module.mean.tolist() == [3.0, 3.0]
    assert seen.most.tolist() == [2.0]


def test_every_microbatch_begins_from_the_same():
    module = Holder(mean=torch.tensor([1.0]), steps=torch.tensor(3))
    buffers = Buffers(module, CPU)
    module.mean.fill_(9.0)
    module.steps.fill_(9)
    buffers.restore()
    assert (module.mean.item(), module.steps.item()) == (1.0, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_never_changes_keeps_its_bits(dtype):
    start = torch.tensor([-0.0, 0.0, math.nan, math.inf, -math.inf, 1 / 3, 1e-30], dtype=dtype)
    module = Holder(constant=start.clone(), mean=torch.zeros(1))
    _, seen = step(
        module, (0.3, {"mean": torch.ones(1)}), (0.7, {"constant": start, "mean": torch.ones(1)})
    )
    assert bits(module.constant) == bits(start)
    assert not seen.most.isnan().any()
    assert module.mean == 1.0


@pytest.mark.parametrize(
    ("start", "left"), [(0.0, math.nan), (0.0, math.inf), (math.inf, 0.0), (0.0, -1e14)]
)
def test_what_cannot_be_added_is_seen(start, left):
    module = Holder(mean=torch.tensor([start, 0.0]))
    _, seen = step(module, (1.0, {"mean": torch.tensor([left, 0.0])}))
    assert not seen.most[0] <= _fixed_point.LARGEST


def test_a_module_without_buffers_costs_nothing():
    buffers, _ = step(nn.Linear(2, 2), (1.0, {}))
    assert [len(words) for words in buffers.sums] == [0, 0]
    assert buffers.others.shape == (0,)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "cache", torch.zeros(3)),
        lambda module: setattr(module, "cache", None),
        lambda module: delattr(module, "cache"),
    ],
)
def test_a_buffer_that_changes_its_shape_is_named(change):
    module = Holder(cache=torch.zeros(2))
    buffers = Buffers(module, CPU)
    change(module)
    text = r"a buffer must keep its shape within a step under strategy 'exact', but `cache` was "
    with pytest.raises(RuntimeError, match=re.escape(text + "(2,) and is ")):
        buffers.take(1.0, Largest(["cache"], CPU), is_first=True)


def test_a_buffer_that_is_new_is_left_alone():
    module = Holder(mean=torch.zeros(1))
    buffers = Buffers(module, CPU)
    module.register_buffer("late", torch.ones(2))
    buffers.take(1.0, Largest(["mean"], CPU), is_first=True)
    buffers.apply()
    buffers.restore()
    assert module.late.tolist() == [1.0, 1.0]


def test_buffers_on_the_module_may_be_shared():
    module = Holder(one=torch.zeros(1))
    module.register_buffer("other", module.one)
    step(module, (0.5, {"one": torch.ones(1)}), (0.5, {"one": torch.ones(1)}))
    assert module.other.item() == 1.0
