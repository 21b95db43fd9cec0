"""`backward` on GPUs: no step waits for one, and what comes back is right once it is read.

Nothing here can be shown on a CPU. Run with ``pytest -m gpu`` on a machine with a GPU.
"""

import pytest
import torch
from on_ranks import run
from torch import nn

from pardata import backward, init, world, wrap_model

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="there is no CUDA device"),
]
needs_two = pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, and there are {GPUS}")


def without_waits(strategy):
    """Run a few steps, all but the first without a wait; return losses, metrics and gradients."""
    with init():
        device = world().device
        torch.manual_seed(0)
        net = nn.Linear(4, 3)
        model = wrap_model(net, strategy)
        rows = torch.arange(24.0, device=device).view(6, 4) / 24
        own = rows[world().rank :: world().size]
        told = []
        for step in range(3):
            model.zero_grad()
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            loss, metrics = backward(model, lambda m, b: (m(b).square().mean(), m(b).mean()), own)
            torch.cuda.set_sync_debug_mode("default")
            told.append((loss, metrics))
        weight = next(model.parameters()).grad
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        return [(a.item(), b.item()) for a, b in told], weight.cpu()


def check(ranks):
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    rows = torch.arange(24.0).view(6, 4) / 24
    loss = net(rows).square().mean()
    loss.backward()
    for told, weight in ranks:
        for found, metric in told:
            assert found == pytest.approx(loss.item(), rel=1e-5)
            assert metric == pytest.approx(net(rows).mean().item(), rel=1e-4)
        torch.testing.assert_close(weight, net.weight.grad)


def test_no_step_of_a_single_process_waits_for_the_gpu():
    check(run(without_waits, "none", world_size=1, fresh=True))


@needs_two
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_no_step_of_two_ranks_waits_for_the_gpu(strategy):
    check(run(without_waits, strategy, world_size=2, fresh=True))
