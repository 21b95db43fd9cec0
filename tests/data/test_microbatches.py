"""What a loader with a `microbatch_size` yields."""

import pickle
from collections.abc import Sequence

import pytest
import torch
from on_ranks import run
from torch import nn

from pardata import Microbatches, backward, world, wrap_model


def microbatches(batches="abc", first=2, counts=(4, 4, 4, 4, 4, 1), **more):
    return Microbatches(batches, epoch=3, step=7, first=first, counts=counts, **more)


def test_it_is_a_sequence_of_batches_that_knows_where_it_is():
    found = microbatches()
    assert isinstance(found, Sequence)
    assert (list(found), len(found), bool(found)) == (["a", "b", "c"], 3, True)
    assert (found[0], found[-1], list(found[1:])) == ("a", "c", ["b", "c"])
    assert (found.epoch, found.step, found.first) == (3, 7, 2)
    assert found.counts == (4, 4, 4, 4, 4, 1)
    with pytest.raises(IndexError):
        found[3]
    with pytest.raises(TypeError, match="does not support item assignment"):
        found[0] = "d"


def test_microbatches_may_be_empty_and_copy_their_arguments():
    batches, counts = ["a"], [4, 4]
    found, empty = microbatches(batches, 0, counts), microbatches(iter([]), 6, placeholder="z")
    batches.append("b")
    counts.append(4)
    assert (list(found), found.counts, found.placeholder) == (["a"], (4, 4), "a")
    assert (list(empty), bool(empty), empty.placeholder) == ([], False, "z")
    assert microbatches(placeholder="z").placeholder == "a"


SHOWN = [
    ("abc", 2, "Microbatches(epoch=3, step=7, 2 … 4 of 6)"),
    ("", 6, "Microbatches(epoch=3, step=7, none of 6)"),
]


@pytest.mark.parametrize(("batches", "first", "text"), SHOWN)
def test_it_says_in_short_what_it_is_and_pickles(batches, first, text):
    found = microbatches(batches, first, placeholder="z", size=3, seed=5)
    there = pickle.loads(pickle.dumps(found))
    assert repr(found) == repr(there) == text
    assert list(found.numbers) == [first + n for n in range(len(batches))]
    assert (list(there), there.size, there.seed) == (list(batches), 3, 5)
    assert (there.placeholder, there.counts) == (found.placeholder, found.counts)


# --- of batches that no loader made ---

X = torch.arange(24.0).view(12, 2).sin()
SIZES = [3, 1, 4, 2, 1, 1]


def _trained_of_own(strategy):
    here = world()
    torch.manual_seed(0)
    noise = nn.Dropout(0.5 if strategy != "ddp" else 0.0)
    model = wrap_model(nn.Sequential(nn.Linear(2, 3), noise, nn.Linear(3, 1)), strategy)
    share = len(SIZES) // here.size
    parts = X.split(SIZES)[here.rank * share :][:share]
    losses = []
    for step in range(2):
        batch = Microbatches.of(parts, step=step)
        assert (batch.first, batch.counts) == (here.rank * share, tuple(SIZES))
        losses.append(backward(model, lambda net, x: net(x).square().mean(), batch).item())
    return losses, [p.grad.tolist() for p in model.parameters()]


@pytest.mark.parametrize("strategy", ["exact", "ddp"])
def test_batches_that_no_loader_made_are_one_step_at_every_size(strategy):
    (whole, gradients), *_ = run(_trained_of_own, strategy, world_size=1)
    assert (whole[0] != whole[1]) is (strategy == "exact")  # another dropout in each step
    for size in (2, 3):
        for losses, found in run(_trained_of_own, strategy, world_size=size):
            if strategy == "exact":
                assert (losses, found) == (whole, gradients)
            torch.testing.assert_close(losses, whole)
            torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(gradients[0]))
