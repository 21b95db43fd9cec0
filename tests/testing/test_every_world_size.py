"""`assert_same_at_every_world_size`: where training parts, said so that one can look."""

import math
import re
from pathlib import Path

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


@pytest.fixture
def _ranks_that_live_on(monkeypatch):
    """Compare what the ranks of all tests do: new ones for each would take most of the time."""
    monkeypatch.setattr("pardata.testing._every_world_size.run", on_ranks.run)


living = pytest.mark.usefixtures("_ranks_that_live_on")


def message(*job, **options):
    with pytest.raises(AssertionError) as caught:
        assert_same_at_every_world_size(*job, **options)
    return str(caught.value)


@living
def test_sums_in_another_order_are_found_with_the_step_the_parameter_and_by_how_much():
    text = message(train, "ddp")
    assert re.match(
        r"training must be the same at every world size, but rank \d of [23] differs from rank 0 "
        r"of 1 after step \d: Tensor-likes are not equal!\n\n"
        r"Mismatched elements: \d+ / \d+ \(\S+\)\nGreatest absolute difference: \S+ at index .*\n"
        r"Greatest relative difference: \S+ at index .*\n\n"
        r"The failure occurred for item \['[02]\.(weight|bias)'\]\n",
        text,
    )
    assert "float64) are sums in another order: pass `rtol` and `atol`, or train with " in text


@living
def test_what_differs_by_rounding_is_the_same_within_a_tolerance():
    assert_same_at_every_world_size(
        train, "ddp", torch.float64, sizes=(1, 2), rtol=1e-8, atol=1e-10
    )


@living
def test_exact_training_is_the_same_to_the_last_bit():
    assert_same_at_every_world_size(train, "exact")


@living
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


ONE = [{"w": torch.zeros(2)}, {"w": torch.ones(2), "b": torch.tensor([1.0, math.nan])}]


def after(step, **tensors):
    """Return the steps of ONE, of which one is otherwise."""
    return [{**trained, **(tensors if at == step else {})} for at, trained in enumerate(ONE, 1)]


HALF = torch.tensor([1.0, 1.5])
DIFFERING = {
    "a number": (
        {2: after(2, w=HALF)},
        ("but rank 0 of 2 differs from rank 0 of 1 after step 2: Tensor-likes are not equal!\n\n"
         "Mismatched elements: 1 / 2 (50.0%)\nGreatest absolute difference: 0.5 at index (1,)"),
    ),
    "NaN on one side": ({2: after(2, b=torch.zeros(2))}, "Greatest absolute difference: nan at in"),
    "the dtype": (
        {2: after(1, w=torch.zeros(2).double())},
        "The values for attribute 'dtype' do not match: torch.float64 != torch.float32.\n",
    ),
    "fewer steps": ({2: ONE[:1]}, "after step 2: The keys of the mappings do not match:\n"),
}  # fmt: skip


@living
@pytest.mark.parametrize(("steps", "text"), DIFFERING.values(), ids=DIFFERING)
def test_a_difference_is_named(steps, text):
    assert text in message(scripted, {1: ONE, **steps}, sizes=(1, 2))


@living
@pytest.mark.parametrize(
    ("steps", "sizes", "says"),
    [
        ({3: after(2, w=HALF)}, (1, 2, 3), "rank 0 of 3 differs from rank 0 of 1 after step 2"),
        ({(2, 1): after(2, w=HALF)}, (2, 1), "rank 1 of 2 differs from rank 0 of 2 after step 2"),
    ],
)
def test_all_ranks_of_all_sizes_are_compared(steps, sizes, says):
    assert says in message(scripted, {1: ONE, **steps}, sizes=sizes)


@living
def test_equal_steps_pass_with_nan_equal_to_nan_numbers_and_layouts_of_any_kind():
    tensors = [
        *map(torch.tensor, ([math.nan, math.inf, -0.0], [1 + 1j, complex(math.nan, 0)], [True], 3)),
        *(torch.zeros(0), torch.eye(2).to_sparse(), torch.ones(1, dtype=torch.bfloat16), 0.1, 3),
    ]
    steps = {1: [dict(enumerate(tensors))]}
    assert_same_at_every_world_size(scripted, steps, sizes=iter((1, 2)))


@living
def test_numbers_are_compared_in_full():
    for one, other in ((0.1, math.nextafter(0.1, 1)), (2**53, 2**53 + 1)):
        steps = {1: [{"loss": one}], 2: [{"loss": other}]}
        assert f"Expected {one} but got {other}." in message(scripted, steps, sizes=(1, 2))


# What is refused, and what comes through


def returns_nothing():
    """As `train` is written by whoever has not heard of ``yield``."""


def fails_in_step_2():
    yield {"w": torch.zeros(1)}
    if world().size == 2 and world().rank == 1:
        raise KeyError("the reason")


REFUSED = {
    "nothing": ((returns_nothing,), TypeError, "must be a generator function, but returned a None"),
    "no step": ((scripted, {1: []}), ValueError, "must yield after each step, but yielded nothing"),
    "a tensor": (
        (scripted, {1: [torch.ones(1)]}), TypeError,
        ("`train` must yield its model, or a dict of tensors or numbers, after each step, but "
         "yielded a Tensor: write `yield model`"),
    ),
}  # fmt: skip


@living
@pytest.mark.parametrize(("job", "kind", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_training_is_refused(job, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        assert_same_at_every_world_size(*job, sizes=(1, 2))


def test_an_error_in_it_comes_through_and_nothing_is_left_behind(short_tmp, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", short_tmp)
    assert_same_at_every_world_size(scripted, {1: ONE}, sizes=(1, 2))
    message(scripted, {1: ONE, 2: ONE[:1]}, sizes=(1, 2))
    with pytest.raises(KeyError, match="the reason") as caught:
        assert_same_at_every_world_size(fails_in_step_2, sizes=(1, 2))
    assert "raised on rank 1" in str(caught.value.__cause__)
    assert "in fails_in_step_2" in str(caught.value.__cause__)
    assert list(Path(short_tmp).iterdir()) == []
