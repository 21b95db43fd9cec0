"""Steps of training on a GPU: gradients, exactness, precisions, compiled models, no host waits.

The gradients are those of the CPU. Run with ``pytest -m gpu``; with ``--device=cpu`` on a CPU.
"""

import contextlib
import shutil

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from on_ranks import run
from torch import nn
from torch.utils.data import TensorDataset

from pardata import (
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

ROWS, CLASSES = 14, 3  # shares of two ranks, and microbatches of 3, are uneven


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, CLASSES)

    def forward(self, rows):
        return self.last(torch.tanh(self.first(rows)))


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


def seeded(kind):
    torch.manual_seed(0)
    return kind()


def data(*shape):
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(ROWS, *shape, generator=numbers)
    return TensorDataset(inputs, torch.arange(ROWS) % CLASSES)


def mean_loss(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


# --- gradients


def options_of(strategy):
    if strategy != "fsdp":
        return {"device_ids": [0]} if strategy == "dp" else {}
    from torch.distributed.fsdp import MixedPrecisionPolicy  # half a second

    return {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


def gradient(device, strategy, microbatch_size=None):
    """Return the loss and the gradient of one step over all the data."""
    with init(device=device):
        if strategy == "exact":
            seed_everything(0, deterministic=True)
        model = wrap_model(seeded(Smooth), strategy, **options_of(strategy))
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
def test_the_gradient_is_that_of_the_cpu(strategy, microbatch_size, everywhere, request):
    if strategy == "fsdp" and "gloo" in request.node.name and torch.cuda.is_available():
        pytest.skip("gloo gathers no shards on a GPU")
    assert_gradient(everywhere(gradient, strategy, microbatch_size), strategy)


@pytest.mark.parametrize("strategy", ["none", "dp"])
def test_so_it_is_in_one_process(strategy, device):
    assert_gradient(run(gradient, device, strategy, world_size=1), strategy)


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


@pytest.mark.parametrize("microbatch_size", [2, 3])
def test_exact_is_the_same_to_the_last_bit_on_one_two_and_three_ranks(microbatch_size, device):
    # cuBLAS reads it when it starts.
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    first, *others = [
        result
        for size in (1, 2, 3)
        for result in run(exact_training, device, microbatch_size, world_size=size, env=env)
    ]
    assert all(other == first for other in others)
    assert len(others) == 5


def test_the_gradient_of_exact_is_that_of_the_cpu(device):
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    found = run(gradient, device, "exact", 3, world_size=2, env=env)
    assert_gradient(found, "exact")


# --- precisions, clipping, compiled models


def trained(device, how):
    """Return the losses of some epochs, by each of them; the replicas stay equal."""
    with init(device=device) as here:
        model = wrap_model(seeded(Smooth))
        if how in ("aot_eager", "inductor"):
            model = torch.compile(model, backend=how)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        scaler = torch.amp.GradScaler(here.device.type, enabled=how == "scaled")
        half = torch.float16 if here.device.type == "cuda" and how == "scaled" else torch.bfloat16

        def loss_fn(model, batch):
            with torch.autocast(here.device.type, dtype=half, enabled=how in ("bf16", "scaled")):
                return scaler.scale(mean_loss(model, batch))

        losses = []
        for batch in _epochs(15):
            optimizer.zero_grad()
            losses.append(backward(model, loss_fn, batch).item() / scaler.get_scale())
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
def test_training_goes_on_in_every_precision_and_compiled(how, everywhere):
    first, *others = everywhere(trained, how)
    assert all(other == first for other in others)
    assert sum(first[-4:]) < 0.9 * sum(first[:4])


# --- no step waits for the GPU


@contextlib.contextmanager
def nothing_waits(device):
    """Raise where the host waits for the GPU."""
    if device.type == "cpu":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def steps_without_waits(device, kind):
    """Run the README's loop, the second epoch under guard; return the loss."""
    with init(device=device) as here:
        model = wrap_model(seeded(Smooth), "ddp")
        optimizer = torch.optim.Adam(model.parameters())
        loader = make_loader(
            data(4), 7, seed=0, microbatch_size=3 if kind == "microbatches" else None
        )
        stop = StopSignal()
        with stop:
            for epoch in range(3):
                guard = nothing_waits(here.device) if epoch else contextlib.nullcontext()
                with guard:
                    for batch in loader:
                        optimizer.zero_grad()
                        loss = backward(model, mean_loss, batch)
                        optimizer.step()
                        if kind == "metrics":
                            told = {"loss": loss, "seen": 7.0, "rows": loss.expand(3)}
                            told = all_reduce_mean(told, weight=7)
                        assert not stop.agreed()
        return float(told["loss"] if kind == "metrics" else loss)


@pytest.mark.parametrize("kind", ["plain", "microbatches", "metrics"])
def test_no_step_of_the_readmes_loop_waits_for_the_gpu(kind, everywhere, request):
    if "gloo" in request.node.name and torch.cuda.is_available():
        pytest.skip("DDP over gloo waits for the GPU itself")
    assert all(0 < loss < 2 for loss in everywhere(steps_without_waits, kind))


def test_the_guard_sees_a_wait(gpu):
    number = torch.ones(1, device=gpu)
    with pytest.raises(RuntimeError, match="synchronizing"), nothing_waits(number.device):
        number.item()
