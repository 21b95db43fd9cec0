"""Sharded tensors: each rank writes its part; any sharding reads them; nothing else is believed."""

import logging
import shutil
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from common_checkpoint import Harm, Thing, leftovers, paths, sharded, sign
from logged import log_of
from on_ranks import caught, run, run_caught
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from pardata import Checkpointer, world

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64]


def tensors():
    return {str(dtype): sharded(torch.arange(10).to(dtype)) for dtype in DTYPES}


# --- read as they were written


def save_tensors(directory):
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, thing=1)
    checkpointer.save(2, thing=Thing(tensors()))


def restore_tensors(directory):
    thing = Thing()
    Checkpointer(directory).restore(thing=thing)
    return thing.state


def test_parts_of_every_type_are_read_at_another_size(tmp_path):
    run(save_tensors, tmp_path, world_size=2)
    for size in (1, 3):
        for found in run(restore_tensors, tmp_path, world_size=size):
            assert [str(tensor.dtype) for tensor in found.values()] == list(found)
            assert all(torch.equal(found[str(d)], torch.arange(10).to(d)) for d in DTYPES)


def save_where_rank_0_fails(directory):
    def broken(*_args, **_options):
        raise OSError(5, "broken disk")

    checkpointer, thing = Checkpointer(directory), Thing(tensors())
    is_broken = patch.object(FileSystemReader, "read_metadata", broken)
    with is_broken if world().is_main else nullcontext():
        raised = caught(lambda: checkpointer.save(1, thing=thing))
    checkpointer.save(2, thing=thing)
    return str(raised), checkpointer.steps()


def test_a_late_error_on_rank_0_raises_on_every_rank(tmp_path):
    for raised, steps in run(save_where_rank_0_fails, tmp_path, world_size=2, timeout=30):
        assert raised.startswith("OSError: ")
        assert "rank 0: OSError(5, 'broken disk')" in raised
        assert steps == [2]


def save_at_once(directory):
    one, other = sharded(torch.arange(10.0)), sharded(torch.arange(10.0) * 3)
    with Checkpointer(directory, asynchronous=True) as checkpointer:
        for step in (1, 2):
            thing = Thing({"a": {"b.c": one, "b": {"c": other}}})
            checkpointer.save(step, thing=thing, value=step)
            # Training goes on at once.
            one.to_local().add_(100)
            other.to_local().add_(100)
        checkpointer.wait()
        again = Thing()
        values = checkpointer.restore(thing=again).values
    found = again.state["a"]
    return values, found["b.c"].tolist(), found["b"]["c"].tolist(), leftovers(directory)


@pytest.mark.parametrize("size", [1, 2])
def test_an_asynchronous_save_keeps_the_shards_of_its_step(size, tmp_path):
    one = [100.0 + k for k in range(10)]
    other = [100.0 + 3 * k for k in range(10)]
    expected = ({"value": 2}, one, other, [])
    assert run_caught(save_at_once, tmp_path, world_size=size) == [expected] * size


# --- made up by somebody who means harm


def with_bytes(metadata, _):
    metadata.state_dict_metadata["('thing', 'torch.int64')"] = BytesStorageMetadata()


def with_harm(metadata, path):
    metadata.planner_data = Harm(path)


def with_another_class(metadata, path):
    metadata.planner_data = path


# What is made of the metadata that were there.
FORGED = {"bytes": with_bytes, "a call": with_harm, "another class": with_another_class}


def restore_each(directory):
    found = []
    for path in sorted(directory.iterdir()):
        with log_of("pardata", logging.INFO) as log:
            values = caught(Checkpointer(path).restore)
        found.append((path.name, values, [line for line in log.lines if "skipped" in line]))
    return found


def test_metadata_that_was_made_up_is_passed_over_and_runs_no_code(tmp_path):
    run(save_tensors, tmp_path / "saved", world_size=2)
    for name, change in FORGED.items():
        checkpoint = paths(shutil.copytree(tmp_path / "saved", tmp_path / "forged" / name))[-1]
        contents = torch.load(checkpoint / "state.pt", weights_only=False)
        change(contents["metadata"], tmp_path / "harm")
        torch.save(contents, checkpoint / "state.pt")
        sign(checkpoint)
    for rank, found in enumerate(run(restore_each, tmp_path / "forged", world_size=2)):
        assert len(found) == len(FORGED)
        for name, values, lines in found:
            assert (values.step, values.values) == (1, {"thing": 1}), name
            assert len(lines) == (1 if rank == 0 else 0)
            assert all("state.pt cannot be read without running code" in line for line in lines)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_a_damaged_part_is_passed_over_on_every_rank(file, tmp_path):
    run(save_tensors, tmp_path / "run", world_size=2)
    part = paths(tmp_path / "run")[-1] / "sharded" / file
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    for [(_, found, _)] in run(restore_each, tmp_path, world_size=2):
        assert (found.step, found.values) == (1, {"thing": 1})
