"""`assert_same_at_every_world_size`: where training parts, said so that one can look."""

import math
import re
from pathlib import Path

import on_ranks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from pardata import backward, make_loader, unwrap, world, wrap_model
from pardata.testing import assert_same_at_every_world_size
from pardata.testing._every_world_size import difference

FSDP_ON_CPU = hasattr(torch.cpu.Stream, "record_event")


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
def test_sums_in_another_order_are_found_with_the_step_the_parameters_and_by_how_much():
    text = message(train, "ddp")
    assert re.match(
        r"training must be the same at every world size, but with [23] processes it is not as "
        r"with 1, on ranks 0, 1(, 2)?, first on rank 0, from step \d on: \d of 4 tensors differ:\n"
        r"(  `[02]\.(weight|bias)`: Mismatched elements: \d+ / \d+ \(\S+\); Greatest absolute "
        r"difference: \S+ at index .*; Greatest relative difference: \S+ at index .*\n)+",
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
@pytest.mark.skipif(not FSDP_ON_CPU, reason="this torch shards on a GPU only")
def test_sharded_models_are_compared_whole():
    assert_same_at_every_world_size(
        train, "fsdp", torch.float64, sizes=(2, 1), rtol=1e-8, atol=1e-10
    )
    assert "`0.weight`: Mismatched elements: 1 / 128 (0.8%); Greatest absolute" in message(
        spoilt_shard, sizes=(1, 2)
    )


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


HALF, FAR = torch.tensor([1.0, 1.5]), torch.tensor([3.0, math.nan])
DIFFERING = {
    "a number": (
        {2: after(2, w=HALF)},
        ("with 2 processes it is not as with 1, on ranks 0, 1, first on rank 0, from step 2 on: "
         "1 of 2 tensors differ:\n  `w`: Mismatched elements: 1 / 2 (50.0%); Greatest absolute "
         "difference: 0.5 at index (1,); Greatest relative difference: 0.5 at index (1,)\n"),
    ),
    "one rank": (
        {(2, 1): after(1, w=torch.tensor([0.0, 2.0]))},
        "on rank 1, from step 1 on: 1 of 1 tensors differ:\n  `w`: Mismatched elements: 1 / 2",
    ),
    "another rank earlier": (
        {(2, 0): after(2, w=torch.zeros(2)), (2, 1): after(1, w=torch.ones(2))},
        ("on ranks 0, 1, first on rank 1, from step 1 on: 1 of 1 tensors differ:\n"
         "  `w`: Mismatched elements: 2 / 2"),
    ),
    "NaN on one side": (
        {2: after(2, w=HALF, b=torch.zeros(2))},
        ("2 of 2 tensors differ:\n  `w`: Mismatched elements: 1 / 2 (50.0%); Greatest absolute "
         "difference: 0.5 at index (1,); Greatest relative difference: 0.5 at index (1,)\n"
         "  `b`: Mismatched elements: 2 / 2 (100.0%); Greatest absolute difference: nan at index"),
    ),
    "names": ({2: after(1, v=FAR)}, "from step 1 on: the names of the tensors differ in ['v']"),
    "the order of names": (
        {2: [ONE[0], dict(reversed(ONE[1].items()))]},
        "from step 2 on: the names of the tensors differ in their order",
    ),
    "the shape": (
        {2: after(1, w=torch.zeros(1))},
        "  `w`: The values for attribute 'shape' do not match: torch.Size([1]) != torch.Size([2])",
    ),
    "the dtype": (
        {2: after(1, w=torch.zeros(2).double())},
        "  `w`: The values for attribute 'dtype' do not match: torch.float64 != torch.float32.\n",
    ),
    "fewer steps": ({2: ONE[:1]}, "from step 1 on: it took 1 steps in all, not 2"),
    "more steps": ({2: [*ONE, ONE[0]]}, "from step 2 on: it took 3 steps in all, not 2"),
    "many": (
        {1: [dict.fromkeys(range(10), 1.0)], 2: [{i: 1.0 + i for i in range(10)}]},
        ("  `8`: Expected 1.0 but got 9.0.; Absolute difference: 8.0; Relative difference: 8.0\n"
         "  and 1 more\nRelative differences of 1e-7 in float32"),
    ),
}  # fmt: skip


@living
@pytest.mark.parametrize(("steps", "text"), DIFFERING.values(), ids=DIFFERING)
def test_the_first_difference_is_named(steps, text):
    assert text in message(scripted, {1: ONE, **steps}, sizes=(1, 2))


@living
@pytest.mark.parametrize(
    ("steps", "sizes", "says"),
    [
        ({3: after(2, w=HALF)}, (1, 2, 3), "with 3 processes it is not as with 1,"),
        ({(2, 1): after(2, w=HALF)}, (2, 1), "with 2 processes it is not as with 2, on rank 1, f"),
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
    steps = {
        1: [{"loss": 0.1, "seed": 2**53}],
        2: [{"loss": math.nextafter(0.1, 1), "seed": 2**53 + 1}],
    }
    text = message(scripted, steps, sizes=(1, 2), rtol=0.1)
    assert "1 of 2 tensors differ:\n  `seed`: Expected 9007199254740992 but got" in text
    text = message(scripted, steps, sizes=(1, 2))
    assert "`loss`: Expected 0.1 but got 0.10000000000000002.; Absolute difference: 1.38" in text


# One tensor against another


@given(st.floats(-1e30, 1e30), st.floats(-1e30, 1e30), st.floats(0, 1), st.floats(0, 1e30))
def test_the_tolerance_is_that_of_isclose(ours, theirs, rtol, atol):
    far = abs(ours - theirs) > atol + rtol * abs(theirs)
    a, b = (torch.tensor([number], dtype=torch.float64) for number in (ours, theirs))
    assert bool(difference(a, b, (rtol, atol))) == far


# What is refused, and what comes through


def returns_nothing():
    """As `train` is written by whoever has not heard of ``yield``."""


def returns_its_model():
    return nn.Linear(1, 1)


def fails_in_step_2():
    yield {"w": torch.zeros(1)}
    if world().size == 2 and world().rank == 1:
        raise KeyError("the reason")


REFUSED = {
    "nothing": ((returns_nothing,), TypeError, "must be a generator function, but returned a None"),
    "a model": ((returns_its_model,), TypeError, "returned a Linear: write `yield model` after"),
    "no step": ((scripted, {1: []}), ValueError, "must yield after each step, but yielded nothing"),
    "a tensor": (
        (scripted, {1: [torch.ones(1)]}), TypeError,
        ("`train` must yield its model, or a dict of tensors or numbers, after each step, but "
         "yielded a Tensor: write `yield model`"),
    ),
    "a dict of dicts": (
        (scripted, {1: [{"a": {"w": 1}}]}), TypeError, "but 'a' in its dict is a dict: leave it out"
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
