"""The model on GPUs: scattering, nccl, one GPU for two ranks, modules on several devices.

Run with ``pytest -m gpu``; with ``--device=cpu`` on a CPU.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the usual name
from on_ranks import run
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pardata import check_in_sync, fingerprint, init, load_weights, unwrap, wrap_model
from pardata.model._batch_norm import is_synchronised

needs_two = pytest.mark.usefixtures("needs_two")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, rows):
        return self.last(torch.relu(self.norm(self.first(rows))))


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, rows, targets=None, kind="scores"):
        scores = self.last(torch.tanh(self.first(rows)))
        if kind == "scores":
            return scores
        loss = F.cross_entropy(scores, targets)
        return {"loss": loss, "scores": scores} if kind == "dict" else (loss, scores)


def seeded(kind=Net, seed=0):
    torch.manual_seed(seed)
    return kind()


def batch(rows=7, seed=0):
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=numbers), torch.arange(rows) % 3


# dp


@needs_two
@pytest.mark.parametrize("kind", ["tuple", "dict"])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_dp_scatters_and_its_loss_is_the_mean_over_the_batch(kind, rows):
    inputs, targets = (tensor.cuda() for tensor in batch(rows))
    net = seeded(Smooth).cuda()
    bare = copy.deepcopy(net)
    loss, scores = bare(inputs, targets, kind="tuple")
    loss.backward()
    wrapped = wrap_model(net, "dp", device_ids=[0, 1])
    assert isinstance(wrapped, DataParallel)
    output = wrapped(inputs, targets=targets, kind=kind)
    ours, gathered = (output["loss"], output["scores"]) if kind == "dict" else output
    assert ours.shape == ()
    torch.testing.assert_close(ours, loss)
    torch.testing.assert_close(gathered, scores)
    ours.backward()
    for parameter, expected in zip(net.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@needs_two
def test_dp_takes_devices_in_every_spelling_and_begins_at_the_first():
    for ids in ([1, 0], [torch.device("cuda", 1), torch.device("cuda", 0)], ["cuda:1", "cuda:0"]):
        wrapped = wrap_model(seeded(Smooth), "dp", device_ids=ids)
        assert next(wrapped.parameters()).device == torch.device("cuda", 1)
        assert wrapped(batch()[0].cuda(1)).device == torch.device("cuda", 1)


@needs_two
def test_dp_puts_the_output_where_it_is_asked_to():
    wrapped = wrap_model(seeded(Smooth), "dp", device_ids=[0, 1], output_device=1)
    inputs, targets = (tensor.cuda() for tensor in batch())
    loss, scores = wrapped(inputs, targets, kind="tuple")
    assert loss.device == scores.device == torch.device("cuda", 1)


def test_dp_on_one_gpu_keeps_a_scalar(device):
    wrapped = wrap_model(seeded(Smooth), "dp", device=device, device_ids=[0])
    inputs, targets = (tensor.to(device) for tensor in batch())
    loss, scores = wrapped(inputs, targets, kind="tuple")
    assert loss.shape == ()
    assert scores.device == torch.device(device)
    assert list(wrapped.state_dict()) == list(Smooth().state_dict())


# One process


def test_a_single_process_moves_the_model_to_its_gpu(gpu):
    net = seeded()
    assert wrap_model(net) is net
    assert next(net.parameters()).device == torch.device(gpu)


def test_fingerprints_do_not_depend_on_the_device(device):
    expected = fingerprint(seeded())
    assert fingerprint(seeded().to(device)) == expected
    assert fingerprint(wrap_model(seeded(), "dp", device=device, device_ids=[0])) == expected


# ddp with gloo: any number of ranks on one GPU


def current(device):
    """Return a device that the others take for granted once it is the current one."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def steps(strategy, sync_batchnorm, device):
    rank, device = dist.get_rank(), current(device)
    wrapped = wrap_model(seeded(seed=rank), strategy, device=device, sync_batchnorm=sync_batchnorm)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = (t.to(device) for t in batch(6, seed=10 * step + rank))
        optimizer.zero_grad()
        F.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()
        check_in_sync(wrapped)
    assert next(wrapped.parameters()).device == device
    if isinstance(wrapped, DistributedDataParallel):
        assert wrapped.device_ids == ([device.index] if device.type == "cuda" else None)
        # Batches from the CPU are moved.
        assert wrapped(batch()[0]).device == device
    load_weights(wrapped, seeded(seed=5).state_dict())
    return fingerprint(wrapped) == fingerprint(seeded(seed=5))


@pytest.mark.parametrize("size", [1, 2])
def test_two_ranks_share_one_gpu_through_gloo(size, device):
    assert run(steps, "ddp", False, device, world_size=size) == [True] * size


def gradients_on(device):
    rank, size, device = dist.get_rank(), dist.get_world_size(), current(device)
    wrapped = wrap_model(seeded(Smooth), "ddp", device=device)
    inputs, targets = (tensor.chunk(size)[rank].to(device) for tensor in batch(8))
    F.cross_entropy(wrapped(inputs), targets).backward()
    return [parameter.grad.cpu() for parameter in wrapped.parameters()]


def test_the_gradient_on_a_gpu_is_that_of_the_global_batch(device):
    net = seeded(Smooth)
    inputs, targets = batch(8)
    F.cross_entropy(net(inputs), targets).backward()
    for told in run(gradients_on, device, world_size=2):
        for ours, parameter in zip(told, net.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-5)


def lonely_on(device):
    rank, device = dist.get_rank(), current(device)
    wrapped = wrap_model(seeded(), "ddp", device=device)
    for step in range(2):
        wrapped(batch(seed=step)[0].to(device)).sum().backward()
    if rank == 1:
        with torch.no_grad():
            wrapped.eval()(batch()[0].to(device))
        wrapped.train()
    dist.barrier()
    wrapped(batch(seed=rank)[0].to(device)).sum().backward()
    check_in_sync(wrapped)


def test_an_evaluation_on_one_rank_alone_waits_for_nobody(device):
    run(lonely_on, device, world_size=2, timeout=60)


# ddp and fsdp with nccl: a GPU for each rank


def with_nccl(kind, strategy, sync_batchnorm):
    """Leave the gloo group that `run` made, make one for GPUs, and let `init` adopt it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    dist.init_process_group(
        "cuda:nccl,cpu:gloo" if kind == "cuda" else "gloo",
        store=dist.PrefixStore("gpu", store),
        rank=rank,
        world_size=size,
        device_id=device if kind == "cuda" else None,
    )
    here = init()
    assert here.device == device  # which nobody has made current
    assert kind == "cpu" or torch.cuda.current_device() == rank
    assert sorted(here.backend.split(",")) == (
        ["cpu:gloo", "cuda:nccl"] if kind == "cuda" else ["gloo"]
    )
    return steps(strategy, sync_batchnorm, device)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_rank_trains_with_nccl(strategy, device):
    kind = torch.device(device).type
    assert run(with_nccl, kind, strategy, False, world_size=1, fresh=True) == [True]


@needs_two
@pytest.mark.parametrize("sync_batchnorm", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_with_nccl(strategy, sync_batchnorm):
    found = run(with_nccl, "cuda", strategy, sync_batchnorm, world_size=2, fresh=True)
    assert found == [True, True]


# SyncBatchNorm


def normalised(device):
    """Statistics over the global batch: those of one process that has it all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(device)
    wrapped = wrap_model(seeded(), "ddp", device=device, sync_batchnorm=True)
    kinds = {type(module) for module in unwrap(wrapped).modules()}
    assert nn.SyncBatchNorm in kinds
    assert nn.BatchNorm1d not in kinds
    wrapped(batch(8)[0].chunk(size)[rank].to(device)).sum().backward()
    check_in_sync(wrapped)
    return wrapped.norm.running_mean.cpu(), wrapped.norm.running_var.cpu()


def with_nccl_normalised():
    with_nccl("cuda", "ddp", False)
    return normalised(torch.device("cuda", dist.get_rank()))


@needs_two
def test_sync_batchnorm_sees_the_global_batch():
    net = seeded()
    net(batch(8)[0])
    for mean, variance in run(with_nccl_normalised, world_size=2, fresh=True):
        torch.testing.assert_close(mean, net.norm.running_mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(variance, net.norm.running_var, rtol=1e-4, atol=1e-5)


def sync_on_cpu():
    norm = wrap_model(seeded(), "ddp", device="cpu", sync_batchnorm=True).norm
    return is_synchronised(norm) and type(norm) is nn.BatchNorm1d


def test_sync_batchnorm_is_our_own_for_a_model_on_the_cpu():
    assert run(sync_on_cpu, world_size=2) == [True, True]


def test_sync_batchnorm_has_nothing_to_do_in_a_single_process():
    assert type(wrap_model(seeded(), sync_batchnorm=True).norm) is nn.BatchNorm1d


# Modules on several devices


class Spread(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first = nn.Linear(4, 8).to(first)
        self.norm = nn.BatchNorm1d(8).to(second)
        self.last = nn.Linear(8, 3).to(second)
        self.places = first, second

    def forward(self, rows):
        first, second = self.places
        return self.last(self.norm(self.first(rows.to(first)).to(second)))


def spread(strategy, first, second):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    wrapped = wrap_model(Spread(first, second), strategy)
    assert wrapped.first.weight.device == first
    assert wrapped.last.weight.device == second
    assert wrapped.device_ids is None
    wrapped(batch(seed=rank)[0]).sum().backward()
    check_in_sync(wrapped)
    return wrapped.last.weight.grad.cpu()


@needs_two
def test_a_module_on_two_gpus_stays_there_and_is_wrapped_without_device_ids():
    first, second = run(
        spread, "ddp", torch.device("cuda", 0), torch.device("cuda", 1), world_size=2
    )
    torch.testing.assert_close(first, second)


@needs_two
def test_a_module_on_two_gpus_is_left_where_it_is_by_none():
    net = Spread(torch.device("cuda", 0), torch.device("cuda", 1))
    assert wrap_model(net, "none", device="cuda:0") is net
    assert net.last.weight.device == torch.device("cuda", 1)
