"""One step under each strategy: how many microbatches are run, and which of them synchronises."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pardata import wrap_model
from pardata.gradient._count import Piece, Pieces
from pardata.gradient._step import ReplicatedStep, ShardedStep, Step

FSDP_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
needs_fsdp = pytest.mark.skipif(
    not FSDP_ON_CPU, reason=f"fully_shard of torch {torch.__version__} needs a GPU"
)
PIECE = Piece("microbatch", 1, 0)
NONE = Pieces([PIECE], lambda: 1)


def at_least(step):
    return [step.sharing.at_least(own, most) for own, most in ((0, 1), (0, 3), (2, 3), (3, 3))]


def numbers_run():
    replicated = wrap_model(nn.Linear(2, 2), "ddp")
    found = {
        "none": at_least(Step(nn.Linear(2, 2))),
        "ddp": at_least(ReplicatedStep(replicated, replicated)),
    }
    if FSDP_ON_CPU:
        sharded = wrap_model(nn.Linear(2, 2), "fsdp")
        found["fsdp"] = at_least(ShardedStep(sharded, sharded))
    return found


def test_ddp_runs_one_at_least_and_what_is_collective_in_each_forward_as_many_as_any():
    for found in run(numbers_run, world_size=2):
        assert found["none"] == [0, 0, 2, 3]
        assert found["ddp"] == [1, 1, 2, 3]
        assert found.get("fsdp", [1, 3, 3, 3]) == [1, 3, 3, 3]


def reduced_by_last(kind):
    torch.manual_seed(0)
    net = nn.Linear(2, 1, bias=False)
    model = DistributedDataParallel(net) if kind == "torch's own" else wrap_model(net, kind)
    step = (ShardedStep if kind == "fsdp" else ReplicatedStep)(model, model)
    rows = torch.full((1, 2), float(dist.get_rank() + 1))
    seen = []
    with step.whole(NONE):
        for last in (False, False, True):
            with step.around(PIECE, last=last):
                step.run(model(rows).mean(), 0.25)
            grad = net.weight.grad
            grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            seen.append(None if grad is None else grad.flatten().tolist())
    return seen, step.loss().item(), net.weight.detach().sum().item() if kind != "fsdp" else None


@pytest.mark.parametrize("kind", ["ddp", "torch's own", pytest.param("fsdp", marks=needs_fsdp)])
def test_all_but_the_last_microbatch_are_accumulated_and_the_last_synchronises(kind):
    one, other = run(reduced_by_last, kind, world_size=2)
    # Gradients of 1 and 2 on the ranks, of which each microbatch is a quarter.
    assert one[0][2] == other[0][2] == [0.25 * 3 * (1 + 2)] * 2
    if kind != "fsdp":  # which keeps what it accumulates to itself; meant as a sum: times the size
        assert one[0][:2] == [[0.5] * 2, [1.0] * 2]
        assert other[0][:2] == [[1.0] * 2, [2.0] * 2]
        weights = one[2]
        assert one[1] == other[1] == pytest.approx(0.25 * 3 * (1 + 2) * weights)
    else:
        assert one[0][:2] == other[0][:2] == [None, None]


def settings_after():
    model = wrap_model(nn.Linear(2, 1), "ddp")
    step = ReplicatedStep(model, model)
    try:
        with step.whole(NONE), step.around(PIECE, last=False):
            raise KeyError
    except KeyError:
        pass
    found = [model.require_backward_grad_sync, model._syncs_buffers]
    if FSDP_ON_CPU:
        sharded = wrap_model(nn.Sequential(nn.Linear(2, 1)), "fsdp")
        step = ShardedStep(sharded, sharded)
        try:
            with step.around(PIECE, last=False):
                raise KeyError
        except KeyError:
            pass
        sharded(torch.ones(1, 2)).sum().backward()  # synchronises, or there is no gradient
        found.append(sharded[0].weight.grad is not None)
    return found


def test_after_an_error_the_model_synchronises_again():
    for found in run(settings_after, world_size=2):
        assert all(found)


@pytest.mark.parametrize(
    ("dtype", "returned"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.float32),
    ],
)
def test_the_loss_is_summed_in_float64_and_returned_as_wide_as_the_model(dtype, returned):
    step = Step(nn.Linear(1, 1, dtype=dtype))
    weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
    for _ in range(10):
        step.run(weight + 0.1, 0.1)
    assert step.loss().dtype == returned
    assert step.loss().item() == pytest.approx(0.1, rel=1e-15 if returned.itemsize == 8 else 1e-7)
    assert weight.grad.item() == pytest.approx(1.0)


def test_a_model_without_parameters_has_a_loss_too():
    assert Step(nn.ReLU()).loss().dtype == torch.float32
