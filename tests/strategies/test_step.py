"""The random numbers of a model: one `seed_everything` is enough, under every strategy."""

import random
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from on_ranks import run, run_caught
from torch import nn
from torch.utils.data import TensorDataset

from pardata import Microbatches, backward, make_loader, seed_everything, unwrap, world, wrap_model
from pardata.rng._seeds import run_seed

STRATEGIES = ["none", "dp", "ddp", "fsdp", "exact"]
SEEDINGS = {
    "seeded": partial(seed_everything, 5),
    "for each rank": partial(seed_everything, 5, per_rank=True),
    "by torch alone": partial(torch.manual_seed, 5),
}


def data():
    numbers = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(12, 6, generator=numbers, dtype=torch.float64))


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()


def squared(model, batch):
    return model(batch[0]).square().mean()


def trained(strategy, seed=3):
    """Train with dropout for two epochs; return losses and weights, and check the generators."""
    seed_everything(seed)
    model = wrap_model(network(), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    loader = make_loader(data(), 6, shuffle=True, microbatch_size=2, seed=1, num_workers=0)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            states = torch.get_rng_state(), random.getstate()
            told.append(backward(model, squared, batch).item())
            assert torch.equal(states[0], torch.get_rng_state())
            assert states[1] == random.getstate()
            optimizer.step()
    for p in unwrap(model).parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        told += whole.flatten().tolist()
    return told


def all_trained():
    chosen = STRATEGIES if world().size == 1 else STRATEGIES[2:]
    return {strategy: trained(strategy) for strategy in chosen}


def test_dropout_with_microbatches_is_equal_under_every_strategy_and_size():
    alone = run(all_trained, world_size=1)[0]
    for size in (1, 2, 3):
        for ranks in run(all_trained, world_size=size):
            for strategy, told in ranks.items():
                assert told == pytest.approx(alone["none"], rel=1e-12), (strategy, size)
            assert ranks["exact"] == alone["exact"]


def test_another_seed_gives_other_numbers_and_without_any_it_is_the_loaders(monkeypatch):
    found = trained("none")
    assert trained("none") == found
    assert trained("none", seed=4) != found

    def unseeded(loader_seed):
        monkeypatch.setattr(run_seed, "seed", None)
        torch.manual_seed(3)
        net = network()
        return [
            backward(net, squared, batch).item()
            for batch in make_loader(data(), 6, microbatch_size=6, seed=loader_seed, num_workers=0)
        ]

    assert unseeded(1) == unseeded(1) != unseeded(2)


class Mask(nn.Module):
    """Notes the random numbers that it draws."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen = []

    def forward(self, rows):
        self.seen.append(torch.rand(3).tolist())
        return self.weight * rows.mean()


def drawn(strategy, how):
    """Return the random numbers of three steps with plain batches; ranks differ in their number."""
    SEEDINGS[how]()
    model = wrap_model(Mask(), strategy)
    for _ in range(3):
        backward(model, lambda model, batch: model(batch), torch.ones(2))
    return [tuple(numbers) for numbers in unwrap(model).seen]


@pytest.mark.parametrize("how", SEEDINGS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_with_other_batches_random_numbers_differ_between_steps_and_ranks(strategy, how):
    first, second = run(drawn, strategy, how, world_size=2)
    assert len({*first, *second}) == 6


def test_seeded_again_the_random_numbers_of_other_batches_begin_again():
    assert drawn("none", "seeded") == drawn("dp", "seeded")
    assert drawn("none", "by torch alone") != drawn("none", "by torch alone")


def with_an_accelerators_numbers(strategy):
    """Train on the CPU with an accelerator's random numbers, as if parameters are offloaded.

    Each step is one microbatch, so that one rank runs it and the other a placeholder.
    """
    own = torch.Generator().manual_seed(3)
    real, there = torch.get_device_module, SimpleNamespace(default_generators=(own,))
    seed_everything(3)
    model = wrap_model(network(), strategy)

    def noisy(model, batch):
        return squared(model, batch) * torch.rand(1, generator=own, dtype=torch.float64)

    before, losses = own.get_state(), []
    loader = make_loader(data(), 2, microbatch_size=2, seed=1, num_workers=0)
    with patch.object(torch, "get_device_module", lambda *kind: real(*kind) if kind else there):
        for batch in loader:
            losses.append(backward(model, noisy, batch).item())
            assert torch.equal(own.get_state(), before)
    return losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "exact"])
def test_an_accelerators_generator_is_seeded_and_put_back_wherever_the_parameters_are(strategy):
    (alone,) = run(with_an_accelerators_numbers, strategy, world_size=1)
    assert len(set(alone)) == 6
    for losses in run(with_an_accelerators_numbers, strategy, world_size=2):
        assert losses == pytest.approx(alone, rel=1e-12)


def seeded_unlike():
    seed_everything(world().rank)
    model = wrap_model(network(), "exact")
    (batch, *_) = make_loader(data(), 6, microbatch_size=2, seed=1, num_workers=0)
    backward(model, squared, batch)


def test_under_exact_ranks_must_be_seeded_alike():
    for rank, raised in enumerate(run_caught(seeded_unlike, world_size=2)):
        assert raised.type == "RuntimeError", raised
        assert f"rank {rank}: the seed of seed_everything={rank}" in raised.text


def test_no_two_steps_epochs_or_microbatches_have_the_same_random_numbers():
    drawn = []

    def loss_fn(model, rows):
        drawn.append(torch.rand(4))
        return model(rows).sum()

    model, rows = torch.nn.Linear(1, 1), torch.ones(2, 1)
    for epoch, step in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        backward(
            model,
            loss_fn,
            Microbatches([rows, rows], epoch=epoch, step=step, first=0, counts=(2, 2)),
        )
    for _ in range(2):
        backward(model, loss_fn, rows)
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(drawn) == 12


def drawn_in_passes(strategy):
    """Return what two passes over each of two batches draw on all ranks, and a resumed run again.

    By the row that each microbatch has, whoever runs it, and without the placeholders.
    """
    seed_everything(3)
    model = wrap_model(Mask(), strategy)
    rows, found = TensorDataset(torch.arange(6.0)), []

    def note(model, batch):
        model(batch[0])
        numbers = unwrap(model).seen[-1] if batch is not given.placeholder else None
        found.append((passes, given.step, batch[0].item(), numbers))
        return model(batch[0])

    loader = make_loader(rows, 3, microbatch_size=1, seed=1, num_workers=0)
    state = loader.state_dict()
    for passes in ("first", "second", "resumed"):
        if passes == "resumed":
            loader.load_state_dict(state)
        if passes != "second":
            batches = list(loader)
        for given in batches:
            backward(model, note, given)
    return [one for one in found if one[-1] is not None]


@pytest.mark.parametrize("strategy", ["ddp", "exact"])
def test_each_call_draws_new_numbers_that_resuming_repeats(strategy):
    alone = run(drawn_in_passes, strategy, world_size=1)[0]
    seen = {one[:-1]: tuple(one[-1]) for one in alone}
    assert len(seen) == 18
    first, second, resumed = (
        {key[1:]: numbers for key, numbers in seen.items() if key[0] == passes}
        for passes in ("first", "second", "resumed")
    )
    assert first == resumed
    assert len({*first.values(), *second.values()}) == 12
    for size in (2, 3):
        together = [one for own in run(drawn_in_passes, strategy, world_size=size) for one in own]
        assert sorted(together) == sorted(alone)
