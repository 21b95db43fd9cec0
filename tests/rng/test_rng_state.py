"""The default generators of Python, NumPy and PyTorch: seeded, put back, caught in use."""

import json
import random
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pardata.rng._rng_state import (
    forked_seed,
    forked_torch_seed,
    generator_states,
    kept_generators,
    no_draws,
    restore_generators,
    seed_generators,
)

# ruff: noqa: NPY002  # NumPy's default generator is the one that users draw from

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _numpy_as_before():
    state = np.random.get_state()
    yield
    np.random.set_state(state)


def draw():
    """Draw from every default generator."""
    return random.random(), np.random.rand(), torch.rand(1).item()


# What draws from one generator alone.
DRAWS = {
    "Python": random.random,
    "Python's gauss": lambda: random.gauss(0, 1),
    "NumPy": np.random.rand,
    "NumPy's normal": np.random.randn,
    "PyTorch": lambda: torch.rand(1),
    "PyTorch's normal": lambda: torch.randn(1),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(4)),
}
EACH = pytest.mark.parametrize("name", DRAWS)


# --- kept ---


@EACH
def test_each_generator_is_put_back_and_what_it_has_in_reserve(name):
    seed_generators(1)
    DRAWS[name]()
    expected = [torch.as_tensor(DRAWS[name]()) for _ in range(2)]
    seed_generators(1)
    DRAWS[name]()
    with kept_generators():
        for _ in range(3):
            DRAWS[name]()
    found = [torch.as_tensor(DRAWS[name]()) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


# --- no draws ---

MESSAGE = (
    "`collate_fn` must draw no random numbers from a batch whose size depends on the number of "
    "ranks, but did: pass `microbatch_size`, so that it gets the same microbatches at every world "
    "size, or reproducible=False"
)


def complaint(name, before=0):
    """Return what is said of a draw, after so many others."""
    seed_generators(1)
    for _ in range(before):
        DRAWS[name]()
    try:
        with no_draws("collate_fn", CPU):
            DRAWS[name]()
    except RuntimeError as error:
        return str(error)
    return None


@EACH
@pytest.mark.parametrize("before", [0, 1])
def test_a_draw_from_any_generator_is_noticed(name, before):
    assert complaint(name, before) == MESSAGE


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_numpys_state_comes_back_whatever_generator_it_draws_from(kind):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(kind(1))
        np.random.randn()  # which keeps another number in reserve
        saved = generator_states(torch.device("cpu"))
        drawn = np.random.randn(3).tolist()
        restore_generators(saved, torch.device("cpu"), only_seed=False)
        assert np.random.randn(3).tolist() == drawn
    finally:
        np.random.set_bit_generator(before)


# --- of a GPU, for which two generators of the CPU stand in ---


@pytest.fixture
def gpus(monkeypatch):
    generators = torch.Generator(), torch.Generator()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for number, generator in enumerate(generators):
        generator.manual_seed(100 + number)
    return generators


def draw_from(generator):
    return torch.rand(1, generator=generator).item()


@pytest.mark.parametrize(("device", "own"), [("cuda:0", 0), ("cuda:1", 1), ("cuda", 1)])
def test_of_the_gpus_only_the_one_asked_for_is_seeded_and_put_back(gpus, device, own):
    other = gpus[1 - own].get_state()
    state = gpus[own].get_state()
    with forked_seed(8, torch.device(device)):
        found = draw_from(gpus[own])
        assert found == draw_from(torch.Generator().manual_seed(8))
    assert torch.equal(gpus[own].get_state(), state)
    assert torch.equal(gpus[1 - own].get_state(), other)


def test_an_accelerator_without_generators_of_its_own_to_hand_out_is_seeded_and_put_back_too(
    monkeypatch,
):
    own = torch.Generator().manual_seed(3)
    for name, does in {
        "manual_seed": own.manual_seed,
        "get_rng_state": own.get_state,
        "set_rng_state": own.set_state,
    }.items():
        monkeypatch.setattr(torch.mps, name, does)
    state = own.get_state()
    with forked_seed(8, torch.device("mps")):
        assert draw_from(own) == draw_from(torch.Generator().manual_seed(8))
    assert torch.equal(own.get_state(), state)
    monkeypatch.setattr(torch, "get_device_module", lambda _=None: torch.mps)
    with forked_torch_seed(9):
        assert draw_from(own) == draw_from(torch.Generator().manual_seed(9))
    assert torch.equal(own.get_state(), state)
    with (
        pytest.raises(RuntimeError, match="`f` must draw no random numbers"),
        no_draws("f", torch.device("mps")),
    ):
        draw_from(own)


# --- written down, and put back in another process


@given(st.integers(0, 2**32), st.booleans())
def test_what_was_written_puts_every_generator_back(seed, half):
    seed_generators(seed)
    if half:  # two normal numbers are made at a time, and the second kept
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    written = generator_states(CPU)
    expected = draw(), random.gauss(0, 1), np.random.randn()
    seed_generators(seed + 1)
    restore_generators(written, CPU, only_seed=False)
    assert (draw(), random.gauss(0, 1), np.random.randn()) == expected


def written(**changes):
    """Return what is written in a process without NumPy, but for some changes."""
    saved = json.loads(zlib.decompress(generator_states(CPU)))
    saved.pop("NumPy", None)
    return zlib.compress(json.dumps(saved | changes).encode())


WRONG = {
    "nothing": b"",
    "no bytes": [0.5],
    "cut": written()[:-10],
    "few words": written(Python=[3, [1] * 624, None]),
    "a word of more bits": written(Python=[3, [*[2**70] * 624, 1], None]),
    "NumPy's few words": written(NumPy=["MT19937", [1] * 623, 3, 0, 0.0]),
    "PyTorch's none": written(PyTorch=1),
    "no count of calls": written(noise=[5]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_was_never_written_is_refused(name):
    text = "cannot restore the random generators, as their saved state is invalid"
    with pytest.raises(RuntimeError, match=text):
        restore_generators(WRONG[name], CPU, only_seed=False)
    assert 0 <= np.random.rand() < 1
