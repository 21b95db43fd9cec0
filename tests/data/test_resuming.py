"""Stopping anywhere and going on anywhere: what a state says, and which samples come after it."""

import json
import logging
import pickle
import re
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from common_data import Numbers, at, flat, joined, loader_of, place, steps
from logged import log_of
from on_ranks import run
from torch.distributed.checkpoint.stateful import Stateful

from pardata import Microbatches, make_loader
from pardata.data._shuffle import Shuffle
from pardata.rng._seeds import mix

# --- what a state says ---


def test_a_state_is_a_few_numbers_that_survive_json_and_weights_only(tmp_path):
    torch.manual_seed(1234)
    state = loader_of(shuffle=True, microbatch_size=2, seed=None).state_dict()
    assert state == {
        "version": 1,
        "samples": "nothing",
        "epoch": 0,
        "delivered": 0,
        "digest": None,
        "state": None,
        "length": 23,
        "batch_size": 5,
        "microbatch_size": 2,
        "shuffle": True,
        "drop_last": True,
        "seed": 1234,  # that of rank 0
        "sampler": None,
        "batch_sampler": None,
        "shards": None,
    }
    assert json.loads(json.dumps(state)) == pickle.loads(pickle.dumps(state)) == state
    torch.save(state, tmp_path / "run.pt")
    assert torch.load(tmp_path / "run.pt", weights_only=True) == state
    assert isinstance(loader_of(), Stateful)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_counts_as_delivered_when_the_loop_receives_it(workers):
    loader = loader_of(num_workers=workers)
    assert place(loader) == (0, 0)
    batches = iter(loader)
    assert place(loader) == (0, 0)
    next(batches)
    assert place(loader) == (0, 5)
    assert [place(loader) for _ in batches] == [(0, 10), (0, 15), (0, 20), (0, 23)]
    assert place(loader) == (1, 0)


# --- from any size to any other ---


def test_a_billion_samples_in_it_goes_on_at_once():
    data = Numbers(10**9)
    loader = make_loader(data, 100, shuffle=True, seed=3, num_workers=0)
    delivered = 987_654_300
    state = {**loader.state_dict(), "epoch": 7, "delivered": delivered}
    asked = []

    def at(shuffle, positions):
        asked.append(len(positions))
        return look_up(shuffle, positions)

    look_up = Shuffle.at
    expected = look_up(Shuffle(10**9, mix(3, 7)), torch.arange(delivered, delivered + 100))
    with patch.object(Shuffle, "at", at):
        loader.load_state_dict(state)
        batch = next(iter(loader))
    assert torch.equal(batch, expected)
    assert sum(asked) <= 2**14
    assert data.read == 100
    assert loader.state_dict()["delivered"] == delivered + 100


# --- what does not match; the whole texts are in tests/promises/errors.md ---


@pytest.mark.parametrize(("epoch", "delivered"), [(0, 24), (0, -5), (0, 5.0), (True, 5)])
def test_a_place_beyond_the_end_is_none(epoch, delivered):
    loader = at(loader_of(), 0, 20)
    text = f"but is at sample {delivered!r} of epoch {epoch!r}: look"
    with pytest.raises(ValueError, match=re.escape(text)):
        at(loader, epoch, delivered)
    assert steps(loader) == [[20, 21, 22]]  # what is refused changes nothing


# --- with another batch size ---

KEEPS = {"shuffle": True, "drop_last": False}
SIZES = [
    {"batch_size": 6},
    {"batch_size": 3, "microbatch_size": 2},
    {"batch_size": 11, "microbatch_size": 4},
]


def _resumed_with(options, state):
    """Run what is left of an epoch; return its steps, the log, and the epoch that is next."""
    with log_of("pardata.data._loader_state", logging.INFO) as log:
        loader = loader_of(**KEEPS, **options)
        loader.load_state_dict(state)
    found = []
    for batch in loader:
        share = batch if isinstance(batch, Microbatches) else [batch]
        found.append([sample for part in share for sample in part.tolist()])
    return found, log.lines, loader.state_dict()["epoch"]


@pytest.mark.parametrize("delivered", [0, 5, 10, 20, 23])
@pytest.mark.parametrize("options", SIZES, ids=str)
def test_another_batch_size_resumes_at_the_next_sample_at_every_world_size(options, delivered):
    saved = at(loader_of(**KEEPS), 1, delivered).state_dict()
    epoch = flat(steps(at(loader_of(**KEEPS), 1)))
    size, rest = options["batch_size"], epoch[delivered:]
    wanted = [rest[start : start + size] for start in range(0, len(rest), size)]
    if len(rest) % size in (1, 2) and "microbatch_size" not in options:
        world_sizes = [1]  # a shuffled step must have a sample for each rank
    else:
        world_sizes = [1, 2, 3]
    for world_size in world_sizes:
        ranks = run(_resumed_with, options, saved, world_size=world_size)
        assert joined([found for found, *_ in ranks]) == wanted
        (line,) = ranks[0][1]
        text = f"resumes at sample {delivered} of epoch 1 of a run with a batch_size of 5"
        assert text in line
        assert [epoch for *_, epoch in ranks] == [2] * world_size


def test_growing_the_batch_size_mid_epoch_reads_each_sample_once():
    seen, state = [], None
    for batch_size in (4, 5, 7):
        loader = loader_of(batch_size=batch_size, **KEEPS)
        if state is not None:
            loader.load_state_dict(state)
        for step, batch in enumerate(loader):
            seen += batch.tolist()
            if step == 1 and batch_size < 7:
                state = loader.state_dict()
                break
    assert sorted(seen) == [*range(23)]


# --- through torch.distributed.checkpoint ---


def _saved(directory):
    loader = loader_of(shuffle=True, num_workers=1)
    steps(loader)
    for step, _ in enumerate(loader):
        if step == 1:
            dcp.save({"loader": loader}, checkpoint_id=directory)
            break
    return loader.state_dict()


def _loaded(directory):
    loader = loader_of(shuffle=True)
    dcp.load({"loader": loader}, checkpoint_id=directory)
    return loader.state_dict(), [*steps(loader), *steps(loader)]


# torch's own words to a single process, and about its own storage
@pytest.mark.filterwarnings("ignore:torch.distributed", "ignore:TypedStorage")
@pytest.mark.parametrize(("size", "other"), [(2, 1), (1, 3)])
def test_a_group_saves_and_another_loads_it_as_a_distributed_checkpoint(tmp_path, size, other):
    loader = loader_of(shuffle=True)
    whole = [steps(loader) for _ in range(3)]
    state = {**loader.state_dict(), "epoch": 1, "delivered": 10}
    rest = [*whole[1][2:], *whole[2]]
    assert run(_saved, str(tmp_path), world_size=size) == [state] * size
    ranks = run(_loaded, str(tmp_path), world_size=other)
    assert {json.dumps(found) for found, _ in ranks} == {json.dumps(state)}
    assert joined([batches for _, batches in ranks]) == rest
    assert _loaded(str(tmp_path)) == (state, rest)  # without a group
