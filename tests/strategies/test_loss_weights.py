"""What a microbatch counts: any integer, and nothing else. All together: test_backward.py."""

import logging

import numpy as np
import pytest
import torch
from logged import log_of
from on_ranks import run
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from pardata import Microbatches, backward, make_loader, world, wrap_model
from pardata.strategies._loss_weights import LossWeights, Replicas


def loss_with(count):
    return backward(
        nn.Linear(2, 1), lambda model, x: model(x).mean(), torch.ones(3, 2), count=count
    )


@pytest.mark.parametrize(
    "number", [7, np.int64(7), np.uint8(7), torch.tensor(7), torch.tensor([7])]
)
def test_a_count_may_be_any_kind_of_integer(number):
    assert loss_with(lambda _: number).isfinite()


def test_one_process_counts_and_returns_the_mean():
    net, seen = nn.Linear(2, 1), []
    batch = torch.ones(3, 2)

    def step(number):
        def count(microbatch):
            seen.append(len(microbatch))
            return number

        return backward(net, lambda model, x: model(x).mean(), batch, count=count)

    assert step(7).item() == step(2).item() == net(batch).mean().item()
    assert seen == [3] * 2


# Whose samples they are, and whether all ranks take the same ones.
BATCHES = {
    "a DataLoader of each rank's own": (lambda data: DataLoader(data, 4), True),
    "a DataLoader with a sampler": (
        lambda data: DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False)),
        False,
    ),
    "some that cannot be looked at": (
        lambda data: [(part, torch.empty(4, device="meta")) for part in data.split(4)],
        False,
    ),
    "make_loader": (lambda data: make_loader(data, 8), False),
    "make_loader, the same for all": (lambda data: make_loader(data, 8, distributed=False), True),
    "make_loader, other samples for all": (
        lambda data: make_loader(data + world().rank, 8, distributed=False),
        False,
    ),
    "make_loader, of samples that are alike": (lambda data: make_loader(data * 0, 8), False),
}


def said_of(name, strategy):
    """Return what is logged while a model learns two epochs of these batches."""
    model = wrap_model(nn.Linear(2, 1), strategy)
    loader = BATCHES[name][0](torch.arange(32.0).view(16, 2))
    with log_of("pardata", logging.WARNING) as log:
        for batch in [*loader, *loader]:
            backward(model, lambda model, x: model(x[0] if type(x) is tuple else x).mean(), batch)
    return log.lines


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", BATCHES)
def test_ranks_that_train_on_the_same_samples_are_warned_once(name, strategy):
    text = "all ranks train on the same samples, as a plain DataLoader gives them: use make_loader"
    lines = run(said_of, name, strategy, world_size=2)
    assert [[text in line for line in own] for own in lines] == [[True] * BATCHES[name][1], []]


class One(Replicas):
    size, min_microbatches = 3, 1


class Most(Replicas):
    size, equal_microbatches = 3, True


@pytest.mark.parametrize("replicas", [One(None), Most(None)])
def test_a_rank_without_microbatches_or_placeholder_raises(replicas):
    batch = Microbatches([], epoch=0, step=0, first=2, counts=(4, 4), size=3)
    text = "must have a microbatch to run if the others run one, but .*none of 2.* has none"
    with pytest.raises(
        ValueError, match=text + ": give it a placeholder, any microbatch of the step"
    ):
        LossWeights.of(batch, None, replicas)
