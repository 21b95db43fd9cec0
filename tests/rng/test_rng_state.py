"""The default generators of Python, NumPy and PyTorch: seeded, put back, caught in use."""

import json
import random
import zlib

import numpy as np
import pytest
import torch

from pardata.rng._rng_state import (
    forbid_rng_use,
    fork_rng,
    fork_torch_rng,
    get_rng_state,
    seed_generators,
    serialize_rng_state,
    set_rng_state,
)

# ruff: noqa: NPY002  # NumPy's default generator is the one that users draw from

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("name", DRAWS)
def test_each_generator_is_restored_and_a_draw_raises(name):
    seed_generators(1)
    DRAWS[name]()
    expected = [torch.as_tensor(DRAWS[name]()) for _ in range(2)]
    seed_generators(1)
    DRAWS[name]()
    text = "`collate_fn` must draw no random numbers: pass `microbatch_size`"
    with fork_rng(), pytest.raises(RuntimeError, match=text), forbid_rng_use("collate_fn", CPU):
        DRAWS[name]()
    found = [torch.as_tensor(DRAWS[name]()) for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


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
def test_only_the_requested_gpu_is_seeded_and_restored(gpus, device, own):
    other = gpus[1 - own].get_state()
    state = gpus[own].get_state()
    with fork_rng(8, torch.device(device)):
        found = draw_from(gpus[own])
        assert found == draw_from(torch.Generator().manual_seed(8))
    assert torch.equal(gpus[own].get_state(), state)
    assert torch.equal(gpus[1 - own].get_state(), other)


def test_an_accelerator_without_default_generators_is_seeded_and_restored(monkeypatch):
    own = torch.Generator().manual_seed(3)
    for name, does in {
        "manual_seed": own.manual_seed,
        "get_rng_state": own.get_state,
        "set_rng_state": own.set_state,
    }.items():
        monkeypatch.setattr(torch.mps, name, does)
    state = own.get_state()
    with fork_rng(8, torch.device("mps")):
        assert draw_from(own) == draw_from(torch.Generator().manual_seed(8))
    assert torch.equal(own.get_state(), state)
    monkeypatch.setattr(torch, "get_device_module", lambda _=None: torch.mps)
    with fork_torch_rng(9):
        assert draw_from(own) == draw_from(torch.Generator().manual_seed(9))
    assert torch.equal(own.get_state(), state)
    with (
        pytest.raises(RuntimeError, match="`f` must draw no random numbers"),
        forbid_rng_use("f", torch.device("mps")),
    ):
        draw_from(own)


# --- written down, and put back in another process


def test_what_was_written_puts_every_generator_back():
    seed_generators(1)

    def draw():  # two normal numbers are made at a time, and the second kept
        return [torch.as_tensor(one()).tolist() for one in DRAWS.values()]

    draw()
    written = serialize_rng_state(get_rng_state(CPU))
    expected = draw()
    seed_generators(2)
    set_rng_state(written, CPU, only_seed=False)
    assert draw() == expected


def written(**changes):
    """Return what is written, but for some changes."""
    saved = json.loads(zlib.decompress(serialize_rng_state(get_rng_state(CPU))))
    return zlib.compress(json.dumps(saved | changes).encode())


WRONG = {
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
        set_rng_state(WRONG[name], CPU, only_seed=False)
    assert 0 <= np.random.rand() < 1
