"""More ranks than any other test has: real ones, and, where it is arithmetic, thousands."""

import os
import signal

import pytest
import torch
from launched import launched
from torch import nn

import pardata
from pardata.data._plan import Plan

MANY, FEWER = 32, 24
RANKS, LENGTH = 4096, 10**9


# --- real ranks: 20 s on two busy cores


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of(model, batch):
    (x,) = batch
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def train(directory, steps):
    """Train for `steps`, stop together, save and leave; begin with what was saved before."""
    data = torch.utils.data.TensorDataset(torch.randn(960, 8, generator=torch.Generator()))
    with pardata.init(device="cpu") as here, pardata.StopSignal(signal.SIGUSR2) as stop:
        pardata.seed_everything(0)
        loader = pardata.make_loader(data, 96, shuffle=True, microbatch_size=2)
        model = pardata.wrap_model(net())
        optimizer = torch.optim.Adam(model.parameters())
        checkpointer = pardata.Checkpointer(directory)
        run = {"model": model, "optimizer": optimizer, "loader": loader}
        first = checkpointer.restore(**run).step
        losses = []
        for number, batch in enumerate(loader, first + 1):
            optimizer.zero_grad()
            losses.append(float(pardata.backward(model, loss_of, batch)))
            optimizer.step()
            if number == first + steps and here.rank == here.size // 2:
                os.kill(os.getpid(), signal.SIGUSR2)
            if stop.agreed():
                break
        checkpointer.save(number, **run)
        pardata.check_in_sync(model)
        return here.size, first, losses, pardata.fingerprint(model)


@pytest.mark.soak
def test_32_ranks_resume_as_24_and_equal_one_process(tmp_path):
    torch.manual_seed(0)
    outcomes = launched(train, str(tmp_path / "many"), 3, size=MANY)
    assert {outcome[:2] for outcome in outcomes} == {(MANY, 0)}
    assert len({(tuple(losses), bits) for _, _, losses, bits in outcomes}) == 1
    went_on = launched(train, str(tmp_path / "many"), 3, size=FEWER)
    steps = len(outcomes[0][2])
    assert {outcome[:2] for outcome in went_on} == {(FEWER, steps)}
    assert len({(tuple(losses), bits) for _, _, losses, bits in went_on}) == 1

    (alone,) = launched(train, str(tmp_path / "one"), 3, size=1)
    (then,) = launched(train, str(tmp_path / "one"), 3, size=1)
    expected = torch.tensor(alone[2] + then[2])
    found = torch.tensor(outcomes[0][2] + went_on[0][2])
    torch.testing.assert_close(found[: len(expected)], expected[: len(found)], rtol=1e-4, atol=0)


# --- arithmetic


@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize("samples", [4 * RANKS * 3, RANKS * 3 + 1, RANKS - 5])
def test_thousands_of_ranks_share_each_sample_of_a_step_once(samples, microbatch_size):
    shares = [
        Plan(LENGTH, samples, False, microbatch_size, rank, RANKS).local_ranges(samples)
        for rank in range(RANKS)
    ]
    shares = [
        (step.local_samples, runs) for step, runs in shares if step.local_samples
    ]  # the others: a stand-in
    runs = [run for _, runs in shares for run in runs]
    assert [place for run in runs for place in run] == list(range(samples))
    pieces = [len(runs) if microbatch_size else rows for rows, runs in shares]
    assert max(pieces) - min(pieces) <= 1


def test_the_last_step_of_a_billion_samples_is_asked_for_directly():
    plan = Plan(LENGTH, 3 * RANKS, False, 3, RANKS - 1, RANKS)
    last = plan[len(plan) - 1]
    assert last[-1] == LENGTH - 1
    assert plan.local_ranges(len(last))[0].local_samples <= 3
