"""The default generators of Python, NumPy and PyTorch: seeded, put back, caught in use."""

import json
import random
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pardata.seeds._generators import (
    default_generators,
    forked_seed,
    forked_torch_seed,
    generator_states,
    kept_generators,
    no_draws,
    numpy_or_none,
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


@pytest.fixture
def _without_numpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)  # makes `import numpy` fail
    for asked_once in (numpy_or_none, default_generators):
        asked_once.cache_clear()
    yield
    monkeypatch.undo()
    for asked_once in (numpy_or_none, default_generators):
        asked_once.cache_clear()


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


# --- seeding ---


@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**63 - 1])
def test_the_numbers_are_those_of_the_generators_own_seeding(seed):
    seed_generators(seed)
    ours = draw()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    assert draw() == ours


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


def test_a_normal_number_of_numpys_that_an_inner_block_saw_used_up_is_in_reserve_again():
    np.random.seed(1)
    np.random.randn()  # the words in memory are the same with the second one in reserve or without
    expected = np.random.get_state()
    with kept_generators():
        np.random.randn()
        with kept_generators():
            pass
    with kept_generators():
        pass
    assert_same_state(np.random.get_state(), expected)


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


def test_a_whole_round_of_numpys_words_is_noticed():
    # 312 numbers are its 624 words: it stands at the same place, among others.
    np.random.seed(0)
    np.random.rand(312)
    before = np.random.get_state()
    with pytest.raises(RuntimeError, match="must draw no"), no_draws("f"):
        np.random.rand(312)
    assert np.random.get_state()[2:] == before[2:]


@pytest.mark.skipif(not hasattr(np.random, "set_bit_generator"), reason="NumPy before 1.24")
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


# --- without NumPy ---


def draw_without_numpy():
    return random.random(), torch.rand(1).item()


@pytest.mark.usefixtures("_without_numpy")
def test_without_numpy_the_others_are_seeded_put_back_and_watched():
    assert numpy_or_none() is None
    numpys = np.random.get_state()[1].tolist()
    seed_generators(3)
    untouched = draw_without_numpy(), draw_without_numpy()
    seed_generators(3)
    before = draw_without_numpy()
    with forked_seed(9):
        inside = draw_without_numpy()
    assert (before, draw_without_numpy()) == untouched
    seed_generators(9)
    assert draw_without_numpy() == inside
    with no_draws("f"):
        pass
    assert complaint("PyTorch") == complaint("Python") == MESSAGE
    assert np.random.get_state()[1].tolist() == numpys


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


def test_a_draw_on_the_gpu_is_noticed_and_one_on_another_is_not(gpus):
    with no_draws("f", torch.device("cuda:0")):
        draw_from(gpus[1])
    with (
        pytest.raises(RuntimeError, match="`f` must draw no random numbers"),
        no_draws("f", torch.device("cuda:0")),
    ):
        draw_from(gpus[0])


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


# --- Python's and NumPy's states, which are read and written in memory where that can be done ---


def assert_same_state(one, other):
    assert one[0] == other[0]
    assert one[1].tobytes() == other[1].tobytes()
    assert one[2:] == other[2:]


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 700),
    st.integers(0, 700),
    st.sampled_from([np.random.randn, np.random.rand, lambda: np.random.seed(1), lambda: None]),
)
def test_numpys_state_is_put_back_to_the_last_word(seed, before, inside, draw_once):
    numpy_generator = default_generators()[1]
    np.random.seed(seed)
    for _ in range(before):
        np.random.randn()
    expected = np.random.get_state()
    state = numpy_generator.state()
    assert not numpy_generator.moved_since(state)
    for _ in range(inside):
        draw_once()
    found = np.random.get_state()
    moved = found[1].tobytes() != expected[1].tobytes() or found[2:] != expected[2:]
    assert numpy_generator.moved_since(state) == moved
    numpy_generator.restore(state)
    assert_same_state(np.random.get_state(), expected)
    assert not numpy_generator.moved_since(state)


def test_a_second_normal_of_numpys_that_was_put_there_by_hand_is_seen():
    np.random.seed(1)
    plain = np.random.get_state()
    state = default_generators()[1].state()
    np.random.set_state((*plain[:3], 1, 0.5))
    assert default_generators()[1].moved_since(state)
    default_generators()[1].restore(state)
    assert_same_state(np.random.get_state(), plain)


@given(
    st.integers(0, 2**32),
    st.integers(0, 700),
    st.integers(0, 700),
    st.sampled_from([random.random, lambda: random.gauss(0, 1), lambda: random.seed(1)]),
)
def test_pythons_state_is_put_back_to_the_last_word(seed, before, inside, draw_once):
    pythons = default_generators()[0]
    random.seed(seed)
    for _ in range(before):
        random.gauss(0, 1)
    expected = random.getstate()
    state = pythons.state()
    for _ in range(inside):
        draw_once()
    assert pythons.moved_since(state) == (random.getstate() != expected)
    pythons.restore(state)
    assert random.getstate() == expected


def test_both_are_read_in_memory_here():
    # Else the loader is slower, and every other test is green.
    assert all(isinstance(state[-1], bytes | type(None)) for state in states()[:2])
    assert len(states()[0]) == 2
    assert len(states()[1]) == 3


def states():
    return [own.state() for own in default_generators()]


@pytest.mark.parametrize("kind", ["MT19937", "PCG64"])
def test_a_bit_generator_that_the_user_chose_is_kept_as_well(kind):
    numpy_generator, mine = default_generators()[1], np.random.get_bit_generator()
    try:
        for seed in (5, 6):
            np.random.set_bit_generator(getattr(np.random, kind)(seed))
            np.random.randn()  # and holds the second one
            before = numpy_generator.state()
            numbers = np.random.randn(), np.random.rand()
            assert numpy_generator.moved_since(before)
            for between in (lambda: None, lambda: np.random.set_bit_generator(mine)):
                numpy_generator.restore(before)
                assert not numpy_generator.moved_since(before)
                assert (np.random.randn(), np.random.rand()) == numbers
                numpy_generator.seed(3)
                between()
            numpy_generator.restore(before)
            drawn = []
            for _ in range(2):
                numpy_generator.seed(3)
                drawn.append(np.random.rand())
            assert drawn[0] == drawn[1]
    finally:
        np.random.set_bit_generator(mine)


def test_generators_that_keep_their_words_elsewhere_are_asked_for_their_state(monkeypatch):
    # As a NumPy before 1.24 would be, or one to come whose memory looks otherwise.
    from pardata.seeds import _generators

    def elsewhere(_address, size):
        return SimpleNamespace(raw=b"?" * size)

    monkeypatch.setattr(_generators, "_memory", elsewhere)
    numpys = _generators._NumPy(np)
    numpys = _generators.Default(numpys.seed, numpys.state, numpys.restore)
    for own, draw_once in ((_generators._of_python(), random.random), (numpys, np.random.rand)):
        own.seed(4)
        state = own.state()
        assert b"?" not in state
        first = draw_once()
        assert own.moved_since(state)
        own.restore(state)
        assert not own.moved_since(state)
        assert draw_once() == first


def test_a_numpy_without_bit_generators_to_set_is_asked_for_its_state(monkeypatch):
    from pardata.seeds import _generators

    monkeypatch.delattr(np.random, "get_bit_generator")
    numpys = _generators._NumPy(np)
    numpys.seed(4)
    state, first = numpys.state(), np.random.rand()
    numpys.restore(state)
    assert np.random.rand() == first


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


@pytest.mark.usefixtures("_without_numpy")
def test_what_was_written_with_numpy_can_be_read_without():
    assert generator_states(CPU) == written()
    restore_generators(
        written(Python=[3, [*[1] * 624, 3], None], NumPy=["MT19937"]), CPU, only_seed=False
    )
    assert random.getstate()[1] == (*[1] * 624, 3)


WRONG = {
    "nothing": b"",
    "no bytes": [0.5],
    "no numbers": ["x"],
    "larger ones": [256],
    "no text": zlib.compress(b"\xff"),
    "no names": zlib.compress(b"[]"),
    "cut": written()[:-10],
    "few words": written(Python=[3, [1] * 624, None]),
    "a place beyond them": written(Python=[3, [*[1] * 624, 10**6], None]),
    "a word of more bits": written(Python=[3, [*[2**70] * 624, 1], None]),
    "NumPy's few words": written(NumPy=["MT19937", [1] * 623, 3, 0, 0.0]),
    "PyTorch's few": written(PyTorch=[[1]]),
    "PyTorch's none": written(PyTorch=1),
    "no count of calls": written(noise=[5]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_was_never_written_is_refused(name):
    text = "cannot restore the random generators, as their saved state is invalid"
    with pytest.raises(RuntimeError, match=text):
        restore_generators(WRONG[name], CPU, only_seed=False)
    assert 0 <= np.random.rand() < 1
