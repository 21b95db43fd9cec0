"""SyncBatchNorm where it cannot be: with microbatches."""

import pytest
import torch
from on_ranks import caught, run
from torch import nn

from pardata import backward, make_loader, wrap_model


def dense(norm):
    return nn.Sequential(nn.Linear(4, 5), norm, nn.Linear(5, 1))


def wrapped_in_one(strategy):
    net = dense(nn.BatchNorm1d(5))
    wrap_model(net, strategy, sync_batchnorm=True)
    return type(net[1])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_changes_nothing_in_a_group_of_one(strategy):
    assert run(wrapped_in_one, strategy, world_size=1) == [nn.BatchNorm1d]


def mean_loss(model, batch):
    return model(batch).square().mean()


def microbatches(size):
    """Return this rank's share of a step of 12 rows, in microbatches of `size`."""
    (step,) = make_loader(torch.randn(12, 4), 12, microbatch_size=size, num_workers=0)
    return step


def in_microbatches(microbatch_size):
    batch, net = microbatches(microbatch_size), dense(nn.SyncBatchNorm(5))
    wrapped = wrap_model(net, "fsdp")
    refused = [caught(backward, wrapped, mean_loss, batch) for _ in range(2)]
    net[1].eval()
    backward(wrapped, mean_loss, batch)  # the group works, as do a frozen one and another model
    backward(wrap_model(dense(nn.BatchNorm1d(5)), "ddp"), mean_loss, batch)
    return refused


@pytest.mark.parametrize(("size", "microbatch_size"), [(2, 3), (2, 12), (3, 4)])
def test_microbatches_are_refused_on_every_rank_before_anything_runs(size, microbatch_size):
    for refused in run(in_microbatches, microbatch_size, world_size=size):
        for raised in refused:
            assert "`batch` must not be Microbatches for a model with SyncBatchNorm" in str(raised)


def test_one_process_takes_any_number_of_microbatches():
    assert backward(dense(nn.SyncBatchNorm(5)), mean_loss, microbatches(4)) > 0
