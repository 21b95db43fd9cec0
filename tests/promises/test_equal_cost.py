"""Training with `cost` is training without: the same batches and bits, shared otherwise."""

import pytest
import torch
from on_ranks import run, run_caught
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from pardata import backward, fingerprint, make_loader, wrap_model

COSTS = [1 + (number * 37 % 23) ** 2 for number in range(40)]


def mean_loss(model, batch):
    rows, labels = batch
    return nn.functional.cross_entropy(model(rows), labels)


def full(parameter):
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().double()


def train(strategy, cost, microbatch_size=1, count=None):
    """Train two epochs; return the fingerprint, the weights, the losses and how many ran here."""
    numbers = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 4, generator=numbers)
    data = TensorDataset(rows, (rows[:, 0] > 0).long())
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(8) if strategy == "exact" else nn.LayerNorm(8)
    dropout = nn.Dropout(0.2 if microbatch_size else 0)
    net = nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), dropout, nn.Linear(8, 2))
    model = wrap_model(net, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sizes = {"microbatch_size": microbatch_size, "cost": cost}
    loader = make_loader(data, 12, shuffle=True, seed=3, num_workers=0, **sizes)
    losses, held = [], []
    for _ in loader.epochs(2):
        for batch in loader:
            held.append(len(batch) if microbatch_size else len(batch[0]))
            optimizer.zero_grad()
            losses.append(float(backward(model, mean_loss, batch, count=count)))
            optimizer.step()
    weights = torch.cat([full(parameter).flatten() for parameter in model.parameters()])
    return fingerprint(model), weights.tolist(), losses, held


def odd_labels(batch):
    return 0.5 + (batch[1] % 2).sum().item()


@pytest.mark.parametrize("count", [None, odd_labels])
def test_the_bits_of_exact_are_those_without_cost(count):
    (expected,) = run(train, "exact", None, 2, count, world_size=1)
    for size in (1, 2, 3, 4):
        even = run(train, "exact", None, 2, count, world_size=size)
        found = run(train, "exact", COSTS, 2, count, world_size=size)
        assert {each[0] for each in even + found} == {expected[0]}
        assert all(each[2] == expected[2] for each in found)
        held = [each[3] for each in found]
        assert size == 1 or held != [each[3] for each in even]
        assert size < 2 or any(max(step) - min(step) > 1 for step in zip(*held, strict=True))


def test_other_strategies_train_as_without_cost():
    (expected,) = run(train, "none", None, world_size=1)
    assert run(train, "none", COSTS, world_size=1)[0][0] == expected[0]
    for size in (1, 2, 3, 4):
        found = run(train, "ddp", COSTS, world_size=size)
        for mark, weights, losses, _ in found:
            assert mark == found[0][0]
            assert weights == pytest.approx(expected[1], rel=1e-4, abs=1e-6)
            assert losses == pytest.approx(expected[2], rel=1e-4)


def test_fsdp_takes_shares_of_samples_but_not_of_microbatches():
    (expected,) = run(train, "none", None, None, world_size=1)
    for _, weights, losses, _ in run(train, "fsdp", COSTS, None):
        assert weights == pytest.approx(expected[1], rel=1e-4, abs=1e-6)
        assert losses == pytest.approx(expected[2], rel=1e-4)
    for error in run_caught(train, "fsdp", COSTS, 2, world_size=2):
        assert error.text.startswith("`batch` must be shared by number under 'fsdp'")
