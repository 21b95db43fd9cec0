"""The model on GPUs: scattering, nccl, one GPU for two ranks, modules on several devices.

Run with ``pytest -m gpu``; with ``--device=cpu`` on a CPU.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from common_gpu import Smooth, Spread, seeded
from on_ranks import caught, run
from sharding import whole
from torch import nn
from torch.nn.parallel import DataParallel

from pardata import (
    backward,
    check_in_sync,
    fingerprint,
    init,
    make_loader,
    unwrap,
    wrap_model,
)

needs_two = pytest.mark.usefixtures("needs_two")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, rows):
        return self.last(torch.relu(self.norm(self.first(rows))))


def batch(rows=7, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=numbers), torch.arange(rows) % 3


# dp


@needs_two
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_dp_scatters_and_its_loss_is_the_mean_over_the_batch(rows, gpu):
    inputs, targets = (tensor.to(gpu) for tensor in batch(rows))
    net = seeded(Smooth).to(gpu)
    bare = copy.deepcopy(net)
    loss, scores = bare(inputs, targets, kind="tuple")
    loss.backward()
    wrapped = wrap_model(net, "dp", device_ids=[0, 1])
    assert isinstance(wrapped, DataParallel)
    ours, gathered = wrapped(inputs, targets=targets, kind="tuple")
    assert ours.shape == ()
    torch.testing.assert_close(ours, loss)
    torch.testing.assert_close(gathered, scores)
    ours.backward()
    for parameter, expected in zip(net.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_dp_on_one_gpu_keeps_a_scalar(device):
    wrapped = wrap_model(seeded(Smooth), "dp", device=device, device_ids=[0])
    inputs, targets = (tensor.to(device) for tensor in batch())
    loss, scores = wrapped(inputs, targets, kind="tuple")
    assert loss.shape == ()
    assert scores.device == torch.device(device)
    assert list(wrapped.state_dict()) == list(Smooth().state_dict())


# One process


def test_a_single_process_moves_the_model_to_its_gpu(gpu):
    net = seeded(Net)
    assert wrap_model(net) is net
    assert next(net.parameters()).device == torch.device(gpu)


def test_fingerprints_do_not_depend_on_the_device(device):
    expected = fingerprint(seeded(Net))
    assert fingerprint(seeded(Net).to(device)) == expected
    assert fingerprint(wrap_model(seeded(Net), "dp", device=device, device_ids=[0])) == expected


# ddp and fsdp


def trained_on_shares(device, strategy):
    """Train on a step of 8 images and one of a single image, of which the other ranks have none."""
    with init(device=device):
        torch.manual_seed(0)
        parts = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 1)
        net = nn.Sequential(*parts)
        model = wrap_model(net, strategy, sync_batchnorm=strategy != "none")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        images = torch.randn(9, 1, 4, 4, generator=torch.Generator().manual_seed(1))
        losses = []
        for batch in make_loader(images, 8, num_workers=0):
            optimizer.zero_grad()
            losses.append(backward(model, lambda model, x: model(x).square().mean(), batch).cpu())
            optimizer.step()
        state = unwrap(model).state_dict().values()
        return [*losses, *(whole(value).cpu() for value in state)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_sync_batchnorm_training_equals_that_of_one_process(strategy, everywhere, gpu):
    (expected,) = run(trained_on_shares, "cpu", "none", world_size=1)
    for found in everywhere(trained_on_shares, strategy):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


class Doubled(nn.BatchNorm1d):
    def forward(self, rows):
        return 2 * super().forward(rows)


def of_their_own(device):
    with init(device=device) as here:
        net = seeded(Net)
        net.norm = Doubled(8)
        told = str(caught(lambda: wrap_model(net, "ddp", sync_batchnorm=True)))
        assert type(net.norm) is Doubled
        return told if here.size > 1 else REFUSED  # one process replaces nothing


REFUSED = (
    "ValueError: `sync_batchnorm` must find PyTorch's own batch norms, but `norm` (Doubled) has "
    "another forward: add that in another module"
)


def test_a_batch_norm_that_does_more_is_refused_and_stays(everywhere, gpu):
    assert set(everywhere(of_their_own)) == {REFUSED}


# Modules on several devices


def spread(strategy, first, second):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    wrapped = wrap_model(Spread([first, second]), strategy)
    assert wrapped.first.weight.device == first
    assert wrapped.last.weight.device == second
    assert wrapped.device_ids is None
    wrapped(batch(seed=rank)[0]).sum().backward()
    check_in_sync(wrapped)
    return wrapped.last.weight.grad.cpu()


@needs_two
def test_ddp_keeps_a_module_on_its_two_gpus(hardware):
    first, second = run(
        spread, "ddp", torch.device(hardware, 0), torch.device(hardware, 1), world_size=2
    )
    torch.testing.assert_close(first, second)
