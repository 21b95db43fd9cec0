"""Steps of training on a GPU: gradients, exactness, precisions, compiled models, no host waits.

The gradients are those of the CPU. Run with ``pytest -m gpu``; with ``--device=cpu`` on a CPU.
"""

import contextlib
import copy
import math
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the usual name
from common_gpu import NoFloat64, Smooth, nothing_waits, seeded, widest_without_float64
from launched import launched
from on_ranks import Raised, caught, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from pardata import (
    Mean,
    StopSignal,
    all_reduce_mean,
    backward,
    check_in_sync,
    fingerprint,
    init,
    make_loader,
    seed_everything,
    unwrap,
    wrap_model,
)
from pardata.model._replica_state import ReplicaState
from pardata.strategies import _fsdp, _step_metrics
from pardata.strategies._step_metrics import StepMetrics

ROWS, CLASSES = 14, 3  # shares of two ranks, and microbatches of 3, are uneven


class Convolutional(nn.Module):
    """What has batch norm, dropout, and kernels that cuDNN chooses."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()
        )
        self.last = nn.Sequential(nn.Dropout(0.3), nn.Linear(8 * 4 * 4, CLASSES))

    def forward(self, images):
        return self.last(self.body(images))


def data(*shape):
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, *shape, generator=numbers)
    return TensorDataset(inputs, torch.arange(ROWS) % CLASSES)


def mean_loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


# --- gradients


def options_of(strategy, is_offloaded):
    if strategy != "fsdp":
        return {"device_ids": [0]} if strategy == "dp" else {}
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy  # half a second

    if is_offloaded:
        return {"offload_policy": CPUOffloadPolicy(pin_memory=False), "blocks": nn.Linear}
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def gradient(device, strategy, microbatch_size=None, is_offloaded=False):  # noqa: FBT002  # pickled
    """Return the loss and the gradient of one step over all the data."""
    with init(device=device):
        if strategy == "exact":
            seed_everything(0, deterministic=True)
        model = wrap_model(seeded(Smooth), strategy, **options_of(strategy, is_offloaded))
        loader = make_loader(data(4), ROWS, microbatch_size=microbatch_size, seed=0)
        (batch,) = loader
        loss = backward(model, mean_loss, batch)
        grads = (parameter.grad for parameter in unwrap(model).parameters())
        whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
        return loss.item(), [grad.cpu() for grad in whole]


def assert_gradient(found, strategy):
    model = seeded(Smooth)
    expected = mean_loss(model, data(4)[:])
    expected.backward()
    close = {"rtol": 0.05, "atol": 0.01} if strategy == "fsdp" else {"rtol": 1e-4, "atol": 1e-6}
    for loss, grads in found:
        torch.testing.assert_close(torch.tensor(loss), expected.detach(), **close)
        for ours, parameter in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, **close)


@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_gradient_is_that_of_the_cpu(strategy, microbatch_size, everywhere):
    assert_gradient(everywhere(gradient, strategy, microbatch_size), strategy)


@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_so_it_is_where_parameters_stay_on_the_cpu_between_steps(microbatch_size, everywhere):
    assert_gradient(everywhere(gradient, "fsdp", microbatch_size, True), "fsdp")


@pytest.mark.parametrize("strategy", ["none", "dp"])
def test_so_it_is_in_one_process(strategy, device):
    assert_gradient(run(gradient, device, strategy, world_size=1), strategy)


def gradient_of_some_ranks(device):
    """Return the loss and the gradient over all the data: of two ranks in a group, and of one."""
    with init(device=device) as here:
        group = [dist.new_group([0, 1]), dist.new_group([2])][here.rank // 2]
        model = DistributedDataParallel(seeded(Smooth).to(here.device), process_group=group)
        own = {0: slice(3), 1: slice(3, None), 2: slice(None)}[here.rank]
        batch = [tensor.to(here.device) for tensor in data(4)[own]]
        loss = backward(model, mean_loss, batch, count=lambda batch: len(batch[0]))
        return loss.item(), [parameter.grad.cpu() for parameter in model.parameters()]


def test_so_it_is_where_some_of_the_ranks_train_a_model(device):
    assert_gradient(run(gradient_of_some_ranks, device, world_size=3, fresh=True), "ddp")


# --- exact


def exact_training(device, microbatch_size):
    """Return the losses and the fingerprint of two epochs."""
    with init(device=device):
        seed_everything(0, deterministic=True)
        model = wrap_model(Convolutional(), "exact")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = make_loader(
            data(1, 8, 8), 8, shuffle=True, microbatch_size=microbatch_size, drop_last=False, seed=0
        )
        losses = []
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                losses.append(backward(model, mean_loss, batch).item())
                optimizer.step()
        return fingerprint(model), losses


ENV = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # cuBLAS reads it when it starts


@pytest.mark.parametrize("microbatch_size", [2, 3])
def test_exact_is_bitwise_equal_on_one_two_and_three_ranks(microbatch_size, device):
    first, *others = [
        result
        for size in (1, 2, 3)
        for result in run(exact_training, device, microbatch_size, world_size=size, env=ENV)
    ]
    assert all(other == first for other in others)
    assert len(others) == 5


def test_exact_is_the_same_over_every_backend(device, everywhere):
    found = everywhere(exact_training, 3, **ENV)
    assert found == run(exact_training, device, 3, world_size=1, env=ENV) * len(found)


def test_the_gradient_of_exact_is_that_of_the_cpu(everywhere):
    assert_gradient(everywhere(gradient, "exact", 3, **ENV), "exact")


# --- precisions, clipping, compiled models


def trained(device, how):
    """Return the losses of some epochs, by each of them; the replicas stay equal."""
    with init(device=device) as here:
        model = wrap_model(seeded(Smooth))
        if how in ("aot_eager", "inductor"):
            model = torch.compile(model, backend=how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        scaler = torch.amp.GradScaler(here.device.type, enabled=how == "scaled")
        on_gpu = here.device.type != "cpu"
        half = torch.float16 if on_gpu and how == "scaled" else torch.bfloat16

        def loss_fn(model, batch):
            with torch.autocast(here.device.type, dtype=half, enabled=how in ("bf16", "scaled")):
                return mean_loss(model, batch)

        losses = []
        for batch in _epochs(15):
            optimizer.zero_grad()
            losses.append(backward(model, loss_fn, batch, scaler=scaler).item())
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        check_in_sync(model)
        assert next(model.parameters()).device.type == here.device.type
        return losses


def _epochs(number):
    loader = make_loader(data(4), 7, seed=0)
    for _ in range(number):
        yield from loader


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.mark.parametrize(
    "how",
    ["float32", "bf16", "scaled", "aot_eager", pytest.param("inductor", marks=needs_compiler)],
)
def test_training_goes_on_in_every_precision_and_compiled(how, everywhere, hardware, request):
    group = request.node.callspec.params["everywhere"]
    if how == "inductor":
        if hardware == "sim":
            pytest.skip("needs CUDA itself: Triton compiles for it")
        if hardware == "cpu" and "one" in group:
            pytest.skip("on a CPU, where to compile takes a minute, in one kind of group")
    first, *others = everywhere(trained, how)
    assert all(other == first for other in others)
    assert sum(first[-4:]) < 0.9 * sum(first[:4])


# --- no step waits for the GPU


def mean_loss_and_metrics(model, batch):
    loss = mean_loss(model, batch)
    mean = Mean(batch[0].abs().sum(0), torch.ones_like(loss))
    return loss, {"loss": loss, "parts": [loss.detach().expand(5)], "mean": mean}


def steps_without_waits(device, kind):
    """Run the README's loop, but for the first epoch under guard; return the loss."""
    with init(device=device) as here:
        seed_everything(0, deterministic=kind == "exact")
        strategy = {"bare": "auto", "exact": "exact"}.get(kind, "ddp")
        model = wrap_model(seeded(Smooth), strategy)
        loss_fn = mean_loss_and_metrics if kind == "returned metrics" else mean_loss
        optimizer = torch.optim.Adam(model.parameters())
        size = 3 if kind in ("microbatches", "exact") else None
        loader = make_loader(data(4), 7, seed=0, microbatch_size=size)
        stop = StopSignal()
        with stop:
            for epoch in range(3):
                guard = nothing_waits(here.device) if epoch else contextlib.nullcontext()
                with guard:
                    for batch in loader:
                        optimizer.zero_grad()
                        loss = backward(model, loss_fn, batch)
                        optimizer.step()
                        if kind == "returned metrics":
                            loss, told = loss
                        if kind == "metrics":
                            told = {"loss": loss, "seen": 7.0, "parts": loss.expand(5)}
                            told = all_reduce_mean(told, weight=7)
                        assert not stop.agreed()
        return float(told["loss"] if "metrics" in kind else loss)


@pytest.mark.parametrize("kind", ["bare", "plain", "microbatches", "metrics", "returned metrics"])
def test_no_step_of_the_readmes_loop_waits_for_the_gpu(kind, over_nccl):
    # Over gloo DDP itself waits.
    assert all(0 < loss < 2 for loss in over_nccl(steps_without_waits, kind))


def test_no_step_of_exact_does(over_nccl):
    assert all(0 < loss < 2 for loss in over_nccl(steps_without_waits, "exact", **ENV))


def step_that_counts_nothing(device, dtype):
    """Train on rows, and then on none on any rank; return the loss and the gradients of that."""
    with init(device=device) as here:
        model = wrap_model(nn.Linear(4, 2).to(dtype), "ddp")

        def summed(model, batch):
            return model(batch).float().square().sum()

        for rows in (3 + here.rank, 0):
            model.zero_grad()
            loss = backward(model, summed, torch.ones(rows, 4, dtype=dtype, device=here.device))
        return loss.item(), [parameter.grad.tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("needs_two")
def test_a_step_that_counts_nothing_leaves_zeros_and_a_loss_of_nan(dtype, hardware):
    for loss, gradients in launched(step_that_counts_nothing, hardware, dtype, size=2):
        assert math.isnan(loss)
        assert gradients == [[[0.0] * 4] * 2, [0.0] * 2]


def drifted(device, strategy):
    """Return what four steps give, of which rank 1 takes larger ones: NaN, or an error."""
    with init(device=device) as here:
        seed_everything(0, deterministic=strategy == "exact")
        model = wrap_model(nn.Linear(4, 2), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + here.rank))
        found = []
        for batch in make_loader(torch.ones(16, 4), 4, microbatch_size=2, num_workers=0):
            optimizer.zero_grad()
            # DDP rearranges its buckets in the second step, which waits.
            guard = nothing_waits(here.device) if found[1:] else contextlib.nullcontext()
            with guard:
                loss = caught(backward, model, lambda model, x: model(x).square().mean(), batch)
            found.append(str(loss) if isinstance(loss, Raised) else bool(loss.isnan()))
            optimizer.step()
        return found


@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_weights_that_differ_give_nan_and_nothing_waits(strategy, over_nccl):
    results = over_nccl(drifted, strategy, **ENV)
    differs = len(results) > 1
    for found in results:
        assert found == [False, differs, False, differs]  # compared in steps 1, 2 and 4


def drifted_in_a_bare_loop(device):
    """Return the errors of two ``loss.backward()``, between which rank 1 takes a larger step."""
    with init(device=device) as here:
        seed_everything(0)
        model = wrap_model(nn.Linear(4, 2), "ddp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + here.rank))
        found = []
        for _ in range(2):
            loss = model(torch.ones(2, 4, device=here.device)).square().mean()
            found.append(str(caught(loss.backward)))
            optimizer.step()
        return found


@pytest.mark.usefixtures("needs_two")
def test_weights_that_differ_are_an_error_of_a_bare_loop(hardware):
    for first, second in launched(drifted_in_a_bare_loop, hardware, size=2):
        assert first == "None"
        assert "have the same in `loss.backward`, but `weight`, `bias` differ" in second


def launches_of_steps(device):
    """Return how many kernels and copies a step by hand with DDP launches, and one of backward."""
    with init(device=device) as here:
        batch = torch.randn(8, 64, device=here.device), torch.arange(8).to(here.device)
        counts = []
        for width in (16, 4096):
            # One parameter: the simulated device launches a foreach kernel once for each.
            net = nn.Linear(64, width, bias=False)
            by_hand = DistributedDataParallel(copy.deepcopy(net).to(here.device))
            model = wrap_model(net, "ddp")

            def step_by_hand(by_hand=by_hand):
                loss = mean_loss(by_hand, batch)
                loss.backward()
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                return mean / here.size

            def step(model=model):
                return backward(model, mean_loss, batch)

            assert step_by_hand().item() == pytest.approx(step().item())
            for run_one, trained in ((step_by_hand, by_hand), (step, model)):
                run_one()  # DDP arranges its buckets after the first step
                trained.zero_grad()
                before = torch.sim.launches()
                run_one()
                counts.append(torch.sim.launches() - before)
        return counts


def test_a_step_of_two_ranks_launches_few_kernels_more_than_ddp(hardware):
    if hardware != "sim":
        pytest.skip("the simulated device counts launches")
    for small, of_small, large, of_large in launched(launches_of_steps, "sim", size=2):
        assert of_small - small <= 8
        assert of_large - large <= 8


def test_the_guard_sees_a_wait(gpu):
    number = torch.ones(1, device=gpu)
    with pytest.raises(RuntimeError, match="synchronizing"), nothing_waits(number.device):
        number.item()


def told_and_heard(device, *metrics):
    """Return the mean loss and metrics of two ranks, one of 3 samples and one of 1, on one device.

    What a backend would add up is added up here: so much of a step with NCCL one GPU can show.
    """
    losses = torch.tensor([1.0, 5.0], device=device).unbind()
    with nothing_waits(device):
        tallies = [StepMetrics(nn.Identity()) for _ in range(2)]
        for tally, loss, count, more in zip(tallies, losses, (3, 1), metrics, strict=True):
            metrics = {name: loss.expand(4) for name in more}
            tally.add((loss, {**metrics, "mean": Mean(loss * 3, loss)}), count, None)
        layers = [nn.Identity() for _ in tallies]  # held by reference
        for tally, layer in zip(tallies, layers, strict=True):
            tally.replica = ReplicaState.of(layer)
        total = sum(tally.message(2) for tally in tallies)
        for tally in tallies:
            tally.receive(total.clone(), None)
        found = [tally.result() for tally in tallies]
    return [(loss.item(), {name: x.tolist() for name, x in more.items()}) for loss, more in found]


def test_what_ranks_tell_each_other_in_a_step_stops_no_gpu(device):
    assert told_and_heard(device, "a", "a") == [(2.0, {"a": [2.0] * 4, "mean": 3.0})] * 2


def test_a_metric_on_the_cpu_stops_no_gpu_before_it_is_read(device):
    tally, loss, layer = StepMetrics(nn.Identity()), torch.ones((), device=device), nn.Identity()
    with nothing_waits(device):
        tally.add((loss, {"seen": torch.arange(3.0)}), 4, None)
        tally.replica = ReplicaState.of(layer)
        told = tally.message(2)
        tally.receive(told * 2, None)  # of two ranks that say the same
    mean, metrics = tally.result()
    assert (mean.item(), metrics["seen"].tolist()) == (1.0, [0.0, 1.0, 2.0])


def test_on_a_gpu_means_of_unlike_metrics_are_nan(gpu):
    for loss, metrics in told_and_heard(gpu, "a", "b"):
        assert math.isnan(loss)
        assert math.isnan(metrics.pop("mean"))
        assert all(map(math.isnan, *metrics.values()))


# --- memory


def trained_and_evaluated(model, optimizer, loaders, epochs):
    """Train for so many epochs, and return what memory is then in use, and what is reserved."""
    training, validation = loaders
    place = next(model.parameters()).device
    own = torch.get_device_module(place)
    for _ in range(epochs):
        for batch in training:
            optimizer.zero_grad()
            loss, metrics = backward(model, mean_loss_and_metrics, batch)
            optimizer.step()
        with torch.no_grad():
            for batch in validation:
                loss = mean_loss(model, batch)
        del batch, loss, metrics
        own.synchronize()  # what is reserved depends on how far ahead the host is
    if place.type == "cpu":
        return 0, 0
    return own.memory_allocated(), own.memory_reserved()


@pytest.mark.parametrize("microbatch_size", [None, 3])
def test_the_memory_of_training_is_flat_over_forty_epochs(microbatch_size, device):
    model = wrap_model(seeded(Smooth), device=device)
    optimizer = torch.optim.Adam(model.parameters())
    rows = data(4)
    loaders = [
        make_loader(rows, 7, shuffle=True, microbatch_size=microbatch_size, seed=0, device=device),
        make_loader(rows, 5, device=device),
    ]
    known = trained_and_evaluated(model, optimizer, loaders, 2)
    assert trained_and_evaluated(model, optimizer, loaders, 38) == known


def in_replicas(device, replicate):
    """Train in replicas of shards, and return the gradients."""
    with init(device=device) as here:
        replicas = min(replicate, here.size)
        model = wrap_model(seeded(Smooth), "fsdp", replicate=replicas)
        loader = make_loader(data(4), ROWS, microbatch_size=3, seed=0, device=here.device)
        for batch in loader:
            backward(model, mean_loss, batch)
        return [parameter.grad.full_tensor().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("replicate", [1, 2])
def test_replicas_of_shards_train_over_every_kind_of_group(everywhere, replicate):
    net = seeded(Smooth)
    mean_loss(net, data(4).tensors).backward()
    for gradients in everywhere(in_replicas, replicate):
        for found, parameter in zip(gradients, net.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-6)


# --- an accelerator without float64


def without_float64(device, strategy):
    """Return the losses and metrics of steps that make nothing of float64 on the device."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (_fsdp, _step_metrics):
            patch.setattr(module, "widest_float_dtype", widest_without_float64)
        with init(device=device) as here, NoFloat64():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
            model = wrap_model(net, strategy)
            for step in range(2):
                rows = torch.full((2 + here.rank, 4), float(step), device=here.device)
                loss, (mean, number) = backward(model, mean_and_number, rows)
            return loss.device.type, mean.device.type, bool(loss.isfinite()), mean.item(), number


def mean_and_number(model, rows):
    return model(rows).square().mean(), (rows.mean() + len(rows), torch.tensor(2.0).double())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_ranks_need_no_float64_on_the_device(strategy, hardware, everywhere):
    found = everywhere(without_float64, strategy)
    mean = 3.0 if len(found) == 1 else 1 + 13 / 5
    for *where, mean_of_all, two in found:
        assert where == [hardware, hardware, True]
        assert mean_of_all == pytest.approx(mean, rel=1e-6)
        assert two == 2
