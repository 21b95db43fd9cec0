"""Whatever comes from outside: variables, node lists, saved states and files of weights.

A few examples of each; ``pytest -m soak tests/promises/test_fuzz.py`` tries very many.
"""

import io
import json
import os
import pickle
import re
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset
from variables import MPICH, OPEN_MPI, SRUN, TORCHRUN

from pardata import fingerprint, load_weights, make_loader
from pardata.environment._launchers import SINGLE, detect_launch, first_host


def fuzzed(*strategies, quick, soak):
    """Make a test of what must hold for examples of `strategies`: some, or very many."""

    def test_of(holds):
        @pytest.mark.parametrize(
            "examples",
            [
                pytest.param(quick, id="quick"),
                pytest.param(soak, id="soak", marks=pytest.mark.soak),
            ],
        )
        def test(examples):
            settings(max_examples=examples)(given(*strategies)(holds))()

        return test

    return test_of


def told(function, argument):
    """Return what `function` returns, and the text of its `ValueError`: one of them is None."""
    try:
        return function(argument), None
    except ValueError as error:
        return None, str(error)


# --- the variables of launchers

LAUNCHES = [TORCHRUN, SRUN, OPEN_MPI, MPICH, {"PARDATA_LAUNCHER": "auto"}]
OPT_OUT = "set PARDATA_LAUNCHER=none"  # what all of them say
VARIABLES = sorted({name for launch in LAUNCHES for name in launch})

values = st.one_of(
    st.sampled_from(["", "0", "1", "2", "3", "4", "-1", "+1", " 1", "1.0", "two", "٣", "1" * 19]),
    st.sampled_from(["n[1-2]", "n[2-1]", "2(x2)", "2(x999999)", "1(x2),3", "n[٣]", "h1", "a\0b"]),
    st.sampled_from(["auto", "torchrun", "slurm", "mpi", "none", "srun"]),
    st.text(max_size=8),
)
environments = st.builds(
    lambda launches, changes, gone: {
        name: text
        for name, text in {**{k: v for one in launches for k, v in one.items()}, **changes}.items()
        if name not in gone
    },
    st.lists(st.sampled_from(LAUNCHES), max_size=2),
    st.dictionaries(st.sampled_from(VARIABLES), values, max_size=3),
    st.sets(st.sampled_from(VARIABLES), max_size=2),
)


@fuzzed(environments, quick=400, soak=30_000)
def test_any_variables_are_a_consistent_launch_or_an_error_that_names_one(env):
    before = dict(env)
    launch, refusal = told(detect_launch, env)
    assert env == before
    if launch is None:
        named = set(re.findall(r"[A-Z][A-Z_]{3,}", refusal.replace(OPT_OUT, "")))
        assert any(variable.startswith(tuple(named)) for variable in VARIABLES), refusal
        return
    assert 0 <= launch.rank < launch.size
    assert 0 <= launch.local_rank < launch.local_size <= launch.size
    assert (launch.node_rank is None) == (launch.num_nodes is None) or launch.launcher == "torchrun"
    assert (launch.node_rank or 0) < (launch.num_nodes or 10**18)
    if launch is not SINGLE:
        assert launch.launcher in ("torchrun", "slurm", "mpi")
        assert launch.master_addr
        assert 0 < launch.master_port < 65536
        # What was found is what one of the launchers said.
        sizes = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        assert str(launch.size) in {env[name].lstrip("0") for name in sizes if name in env}
    assert detect_launch(env) == launch


# --- node lists

NAMES = st.text(alphabet="abn-.0", min_size=1, max_size=3)
RANGES = st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4))


def range_text(low, more, width):
    return f"{low:0{width}d}" + (f"-{low + more:0{width}d}" if more else "")


HOSTS = st.lists(st.one_of(NAMES, st.lists(RANGES, min_size=1, max_size=3)), min_size=1, max_size=4)


@fuzzed(st.lists(HOSTS, min_size=1, max_size=3), quick=100, soak=10_000)
def test_the_first_host_takes_each_brackets_first_number(hosts):
    texts = [
        "".join(
            piece if isinstance(piece, str) else f"[{','.join(range_text(*r) for r in piece)}]"
            for piece in host
        )
        for host in hosts
    ]
    expected = (
        piece if isinstance(piece, str) else range_text(piece[0][0], 0, piece[0][2])
        for piece in hosts[0]
    )
    assert first_host(",".join(texts)) == "".join(expected)


@fuzzed(st.text(alphabet="an[]-,019 ٣²", max_size=20), quick=300, soak=30_000)
def test_any_text_is_a_node_list_or_refused_at_once(text):
    host, refusal = told(first_host, text)
    assert "SLURM_STEP_NODELIST" in (refusal or "SLURM_STEP_NODELIST")
    assert (host is None) == (refusal is not None)
    assert host != ""
    assert not set("[], ") & set(host or "")


HUGE = {
    "a range": {"SLURM_STEP_NODELIST": "n[1-999999999999]"},
    "many ranges": {"SLURM_STEP_NODELIST": f"n[{','.join(['0-999999'] * 5000)}]"},
    "brackets that never close": {"SLURM_STEP_NODELIST": "n[1" * 20_000},
    "tasks on many nodes": {"SLURM_STEP_TASKS_PER_NODE": ",".join(["2(x999999)"] * 10_000)},
    "a number of many digits": {"SLURM_STEP_NUM_TASKS": "9" * 100_000},
}


@pytest.mark.parametrize("name", HUGE)
def test_what_is_huge_takes_neither_time_nor_memory(name):
    began = time.monotonic()
    launch, refusal = told(detect_launch, {**SRUN, **HUGE[name]})
    assert launch.size == 4 if launch else next(iter(HUGE[name])) in refusal
    assert time.monotonic() - began < 10


# --- the states of a loader

LENGTH = 23
DATA = TensorDataset(torch.arange(LENGTH))
OPTIONS = [
    {"shuffle": True, "seed": 1},
    {"shuffle": True, "seed": 1, "drop_last": False},
    {"seed": 0},
    {"seed": 1, "microbatch_size": 2},
]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
near = st.integers(-1, LENGTH + 6) | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, 10**30])


def loader_of(options):
    return make_loader(DATA, 5, num_workers=0, **options)


def samples(loader):
    """Return the samples of each step; those of microbatches one after another."""
    return [
        [number for batch in step for number in batch[0].tolist()]
        if "Micro" in type(step).__name__
        else step[0].tolist()
        for step in loader
    ]


@fuzzed(
    st.sampled_from(OPTIONS),
    st.dictionaries(
        st.sampled_from(["epoch", "delivered", *loader_of({"seed": 0}).state_dict()]),
        near | json_values,
        max_size=2,
    ),
    st.sets(st.text(max_size=3), max_size=1),
    st.booleans(),
    quick=200,
    soak=10_000,
)
def test_a_changed_state_goes_on_exactly_or_is_refused_and_changes_nothing(
    options, changes, more, drops
):
    loader = loader_of(options)
    real = loader.state_dict()
    state = {**real, **changes, **dict.fromkeys(more, 0)}
    if drops and changes:
        del state[next(iter(changes))]
    state = json.loads(json.dumps(state))
    try:
        loader.load_state_dict(state)
    except (ValueError, TypeError) as error:
        text = str(error)
        assert "`state` must" in text
        called = {"delivered": "at sample"}
        differing = [name for name in real if repr(state.get(name)) != repr(real[name])]
        if state.keys() == real.keys():
            assert any(called.get(name, name) in text for name in differing), text
        assert samples(loader) == samples(loader_of(options))
        return
    # It was a state of this loader: the samples after it, in steps that begin there.
    assert state.keys() == real.keys()
    whole = loader_of({**options, "drop_last": False})
    whole.set_epoch(state["epoch"])
    left = [number for step in samples(whole) for number in step][state["delivered"] :]
    steps = [left[first : first + 5] for first in range(0, len(left), 5)]
    if real["drop_last"]:
        steps = [step for step in steps if len(step) == 5]
    assert samples(loader) == steps
    assert loader.epoch == state["epoch"] + 1


@fuzzed(json_values, quick=100, soak=10_000)
def test_json_that_is_no_state_is_refused(value):
    with pytest.raises(ValueError, match="`state` must be"):
        loader_of({"seed": 0}).load_state_dict(value)


# --- files of weights


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def file_of(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


torch.manual_seed(0)
WHOLE = file_of(net().state_dict())


def try_to_load(data):
    """Load a file of these bytes; return the error, if any, and what the model then is."""
    model = net()
    before = fingerprint(model)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "weights.pt")
        file.write_bytes(data)
        error = None
        try:
            load_weights(model, file)
        except (RuntimeError, TypeError, ValueError) as raised:
            error = raised
        assert [path.name for path in Path(directory).iterdir()] == ["weights.pt"]
    return error, model, before


damaged = st.one_of(
    st.binary(max_size=200),
    st.integers(0, len(WHOLE) - 1).map(lambda end: WHOLE[:end]),
    st.lists(
        st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 7)), min_size=1, max_size=4
    ).map(lambda flips: flipped(WHOLE, flips)),
    st.tuples(st.integers(0, len(WHOLE)), st.binary(min_size=1, max_size=8)).map(
        lambda cut: WHOLE[: cut[0]] + cut[1] + WHOLE[cut[0] :]
    ),
)


def flipped(data, flips):
    changed = bytearray(data)
    for place, bit in flips:
        changed[place] ^= 1 << bit
    return bytes(changed)


@fuzzed(damaged, quick=150, soak=10_000)
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_weights_file_raises_or_keeps_the_shapes(data):
    error, model, before = try_to_load(data)
    if error is not None:
        assert str(error) or type(error) is EOFError
        # What does not fit a parameter is said once the others are loaded, as PyTorch does.
        assert fingerprint(model) == before or "Error(s) in loading state_dict" in str(error)
    assert [tuple(p.shape) for p in model.parameters()] == [(3, 2), (3,), (3,), (3,)]


class Runs:
    """Pickled, it is a call that makes a directory."""

    def __init__(self, directory):
        self.made = str(Path(directory, "made"))

    def __reduce__(self):
        return os.mkdir, (self.made,)


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle 0", "pickle 2", "pickle 5"])
@pytest.mark.filterwarnings("ignore")
def test_a_file_that_carries_code_raises_and_runs_nothing(form, tmp_path):
    code, weights, file = Runs(tmp_path), net().state_dict(), tmp_path / "weights.pt"
    for content in (
        code,
        {**weights, "0.weight": code},
        {**weights, code: torch.ones(1)},
        {**weights, "1.bias": [{"x": (code,)}]},
        {**weights, "_extra_state": code},
    ):
        if "torch" in form:
            torch.save(content, file, _use_new_zipfile_serialization=form == "torch")
        else:
            file.write_bytes(pickle.dumps(content, protocol=int(form[-1])))
        with pytest.raises(RuntimeError, match="must be a file of weights"):
            load_weights(net(), file)
        assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]
