"""`assert_same_at_every_world_size`: where training parts, said so that one can look."""

import math
import re

import on_ranks
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pardata import backward, make_loader, unwrap, world, wrap_model
from pardata.testing import assert_same_at_every_world_size

# What a user would write


def train(strategy, dtype=torch.float32):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 8, dtype=dtype), torch.randint(3, (48,)))
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    model = wrap_model(net, strategy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in make_loader(data, batch_size=12, microbatch_size=2, shuffle=True, seed=0):
        optimizer.zero_grad()
        backward(model, lambda model, b: nn.functional.cross_entropy(model(b[0]), b[1]), batch)
        optimizer.step()
        yield model


@pytest.fixture(autouse=True)
def _ranks_that_live_on(monkeypatch):
    """Compare what the ranks of all tests do: new ones for each would take most of the time."""
    monkeypatch.setattr("pardata.testing._run.run", on_ranks.run)


def message(*job, **options):
    with pytest.raises(AssertionError) as caught:
        assert_same_at_every_world_size(*job, **options)
    return str(caught.value)


def test_sums_in_another_order_raise_with_step_and_parameter():
    text = message(train, "ddp")
    where = r"steps must agree, but rank \d of [23] differs from rank 0 of 1 after step \d: "
    item = r"Greatest absolute difference: \S+ (.*\n)+.* for item \['[02]\.(weight|bias)'\]$"
    assert re.match(rf"{where}(.*\n)+{item}", text)


# With the other strategies and a tolerance: the code of docs/testing.md.
def test_sharded_models_are_compared_whole():
    assert_same_at_every_world_size(
        train, "fsdp", torch.float64, sizes=(2, 1), rtol=1e-8, atol=1e-10
    )
    text = message(spoilt_shard, sizes=(1, 2))
    assert "Mismatched elements: 1 / 128 (0.8%)" in text
    assert "The failure occurred for item ['0.weight']" in text


def spoilt_shard():
    for model in train("fsdp", torch.float64):
        sharded = unwrap(model)[0].weight
        with torch.no_grad():
            sharded.zero_()
            if world().size == 2 and world().rank == 1:
                sharded.to_local()[0, 0] = 1
        yield {"0.weight": sharded}
        return


# What is compared


def scripted(steps):
    """Yield what `steps` says for this size and rank: a list of dicts for each."""
    here = world()
    yield from steps.get((here.size, here.rank), steps.get(here.size, steps.get(1)))


ONE = [{"w": torch.zeros(2)}, {"w": torch.ones(2)}]
OTHER = [ONE[0], {"w": torch.tensor([1.0, 1.5])}]
DIFFERING = {
    "of the second size": ({2: OTHER}, (1, 2), "rank 0 of 2 differs from rank 0 of 1 after step 2"),
    "of the third": ({3: OTHER}, (1, 2, 3), "rank 0 of 3 differs from rank 0 of 1 after step 2"),
    "of another rank": ({(2, 1): OTHER}, (2, 1), "rank 1 of 2 differs from rank 0 of 2 after st"),
    "fewer steps": ({2: ONE[:1]}, (1, 2), "after step 2: The keys of the mappings do not match"),
    "numbers in full": (
        {1: [{"loss": 2**53}], 2: [{"loss": 2**53 + 1}]}, (1, 2),
        f"Expected {2**53} but got {2**53 + 1}.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("steps", "sizes", "says"), DIFFERING.values(), ids=DIFFERING)
def test_a_difference_is_named_of_whichever_rank_and_size(steps, sizes, says):
    assert says in message(scripted, {1: ONE, **steps}, sizes=sizes)


def test_equal_steps_pass_with_nan_and_any_layout():
    tensors = torch.tensor([math.nan, math.inf]), torch.eye(2).to_sparse(), torch.zeros(0), 0.1, 3
    steps = {1: [dict(enumerate(tensors))]}
    assert_same_at_every_world_size(scripted, steps, sizes=iter((1, 2)))


# What is refused, and what comes through


def returns_nothing():
    """As `train` is written by whoever has not heard of ``yield``."""


def fails_in_step_2():
    yield {"w": torch.zeros(1)}
    if world().size == 2 and world().rank == 1:
        raise KeyError("the reason")


REFUSED = {
    "nothing": ((returns_nothing,), TypeError, "'NoneType' object is not iterable"),
    "no step": ((scripted, {1: []}), ValueError, "must yield after each step, but yielded nothing"),
    "an error": ((fails_in_step_2,), KeyError, "the reason"),
}


@pytest.mark.parametrize(("job", "kind", "text"), REFUSED.values(), ids=REFUSED)
def test_invalid_training_raises_and_its_errors_pass_through(job, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        assert_same_at_every_world_size(*job, sizes=(1, 2))
