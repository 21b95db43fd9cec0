"""all_gather of rows, and with gradients: those of one process."""

import pytest
import torch
from on_ranks import caught, run_caught
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import pardata
from pardata import all_gather, backward, broadcast, world, wrap_model

ROWS = [3, 1, 4]


# --- with gradients


def clip(model, left, right, *, own=None):
    """Return the loss of rows against all, gathered if `own` says which they are."""
    left, right = (normalize(x, dim=1) for x in model(left, right))
    if own is None:
        return cross_entropy(model.scale * left @ right.T, torch.arange(len(left)))
    everyone = torch.cat(all_gather(right, differentiable=True))
    return cross_entropy(model.scale * left @ everyone.T, own)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 3), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, left, right):
        return self.left(left), self.right(right)


def made():
    torch.manual_seed(0)
    model, size = Towers().double(), world().size
    rows = sum(ROWS[:size])
    data = [torch.randn(rows, width, dtype=torch.float64) for width in (5, 4)]
    own = [torch.arange(rows), *data]
    return model, data, [x.split(ROWS[:size])[world().rank] for x in own]


def gradients_of(how):
    """Return whether the gradients are those of one process that has all rows."""
    alone, data, (each, left, right) = made()
    model = wrap_model(made()[0], device="cpu")
    loss_of = lambda model, batch: clip(model, *batch, own=each)  # noqa: E731
    if how == "backward":
        backward(model, loss_of, (left, right))
        clip(alone, *data).backward()
    else:  # the mean over the ranks of their means
        loss_of(model, (left, right)).backward()
        scores = [normalize(x, dim=1) for x in alone(*data)]
        losses = cross_entropy(
            alone.scale * scores[0] @ scores[1].T, torch.arange(len(data[0])), reduction="none"
        )
        parts = losses.split(ROWS[: world().size])
        torch.stack([part.mean() for part in parts]).mean().backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return [torch.allclose(a.grad, b.grad, rtol=1e-12, atol=1e-12) for a, b in pairs]


@pytest.mark.parametrize("how", ["backward", "loss.backward"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_over_gathered_rows_equal_those_of_one_process(size, how):
    assert run_caught(gradients_of, how, world_size=size) == [[True] * 5] * size


def sums_of_gradients():
    rank = world().rank
    tree = {
        "rows": torch.ones(1 + rank, 2, 3, dtype=torch.bfloat16, requires_grad=True),
        "number": torch.tensor(2.0, requires_grad=True),
        "unused": torch.ones(1, 1, requires_grad=True),
        "plain": torch.ones(1, 1),
        "whole": 3,
    }
    found = all_gather(tree, differentiable=True)
    with torch.no_grad():
        silent = all_gather(tree, differentiable=True)
    nothing = [each["rows"].requires_grad for each in (*all_gather(tree), *silent)]
    total = sum(each["rows"].float().sum() * (1 + each["number"]) for each in found) * (rank + 1)
    total.backward()
    carried = {name for name in ("rows", "number", "plain") if found[0][name].requires_grad}
    own = tree["rows"].grad
    assert own.dtype == torch.bfloat16
    assert tree["unused"].grad is None
    return carried, any(nothing), own.unique().tolist(), tree["number"].grad.item()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_tensor_gets_the_sum_of_the_gradients_of_all_ranks_losses(size):
    ranks = size * (size + 1) // 2
    for rank, found in enumerate(run_caught(sums_of_gradients, world_size=size)):
        number = 6.0 * (1 + rank) * ranks
        assert found == ({"rows", "number"}, False, [3.0 * ranks], number)


def gather_otherwise(changed):
    """Gather what carries a gradient, and do otherwise on rank 0 in one thing."""
    is_usual = world().rank > 0
    usual = torch.ones(2, requires_grad=is_usual or changed != "requires_grad")
    error = caught(lambda: all_gather(usual, differentiable=is_usual or changed != "flag"))
    return error, all_gather(world().rank)


@pytest.mark.parametrize("changed", ["requires_grad", "flag"])
def test_different_arguments_raise_on_every_rank(changed):
    for error, after in run_caught(gather_otherwise, changed, world_size=3):
        structure = "structure='value: rows of torch.float32"
        assert f"rank 0: {structure}'\n  ranks 1, 2: {structure}, differentiable'" in error.text
        assert after == [0, 1, 2]


def gather_on_another_default_device():
    """With "meta" in place of an accelerator: what is made there by mistake has no numbers."""
    torch.set_default_device("meta")
    try:
        own = torch.tensor([1.0], device="cpu", requires_grad=True)
        (*_, last) = all_gather({"a": own, "n": 3, "x": 0.5, "t": "x"}, differentiable=True)
        last["a"].sum().backward()
        mean, most = pardata.all_reduce_mean([1.0] * 100), pardata.all_reduce_max([2] * 100)
        told = broadcast({"t": own.detach()})["t"].item(), last["n"], last["x"], last["t"]
        return told, own.grad.item(), mean[9], most[9], pardata.all_reduce_sum(own).item()
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_of_it_depends_on_the_default_device(size):
    found = run_caught(gather_on_another_default_device, world_size=size)
    for rank, (told, gradient, *reduced) in enumerate(found):
        assert (told, reduced) == ((1, 3, 0.5, "x"), [1, 2, size])
        assert gradient == (size if rank == size - 1 else 0)


# Their sum; in 16 bits it is 172.5, in whichever order they are added.
HALVES = 8.984375, 75.75, 87.6875


def gather_halves():
    own = torch.zeros(1, dtype=torch.float16, requires_grad=True)
    first, *_ = all_gather(own, differentiable=True)
    (first * HALVES[world().rank]).sum().backward()
    return own.grad.item()


def test_gradients_of_halves_are_added_without_rounding_in_between():
    assert run_caught(gather_halves, world_size=3) == [172.375, 0, 0]  # all go to rank 0
