"""Sharded tensors: each rank writes its part; any sharding reads them; nothing else is believed."""

import pickle
import shutil

import pytest
import torch
from checkpoint_zoo import Harm, Thing, leftovers, limited, log_lines, paths, sharded, sign
from on_ranks import caught, run, run_caught
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from pardata import Checkpointer, all_reduce_sum, world
from pardata.checkpoint import _shards as shards

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int64]


def tensors(factor=1):
    return {str(dtype): sharded((torch.arange(10) * factor).to(dtype)) for dtype in DTYPES}


# --- read as they were written


def write(directory):
    shards.writing(directory, tensors(), None)()


def read(directory):
    targets = tensors(0)
    targets["torch.int64"] = None
    found = shards.read(directory, targets)
    whole = found.pop("torch.int64")
    return whole, {name: tensor.to_local() for name, tensor in found.items()}


def test_parts_are_read_at_another_size_sharded_as_the_target_or_whole(tmp_path):
    run(write, tmp_path, world_size=2)
    expected = torch.arange(10)
    for size in (1, 3):
        for rank, (whole, parts) in enumerate(run(read, tmp_path, world_size=size)):
            assert torch.equal(whole, expected)
            assert list(parts) == list(map(str, DTYPES[:-1]))
            for name, part in parts.items():
                assert str(part.dtype) == name
                assert torch.equal(part, expected.to(part.dtype).chunk(size)[rank])


def save_at_once(directory):
    one, other = sharded(torch.arange(10.0)), sharded(torch.arange(10.0) * 3)
    with Checkpointer(directory, asynchronous=True) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, thing=Thing([one, other]), value=step)
            # Training goes on at once.
            one.to_local().add_(100)
            other.to_local().add_(100)
        checkpointer.wait()
        again = Thing([None, None])
        values = checkpointer.restore(thing=again)
        found = [tensor.tolist() for tensor in again.tensors]
    return values, found, leftovers(directory)


@pytest.mark.parametrize("size", [1, 2])
def test_an_asynchronous_save_has_the_parts_of_its_moment_each_under_its_own_name(size, tmp_path):
    one = [100.0 + k for k in range(10)]
    other = [100.0 + 3 * k for k in range(10)]
    expected = ({"step": 2, "value": 2}, [one, other], [])
    assert run_caught(save_at_once, tmp_path, world_size=size) == [expected] * size


# --- what goes wrong


def fail_to_write(directory, asynchronous):
    here = world()
    checkpointer = Checkpointer(directory, asynchronous=asynchronous)
    thing = Thing([sharded(torch.ones(12_000_000)), sharded(torch.ones(2))])
    save = lambda step: (checkpointer.save(step, thing=thing), checkpointer.wait())  # noqa: E731
    save(1)
    # Less than a part has.
    end = limited() if here.rank == here.size - 1 else int
    raised = caught(save, 2)
    end()
    left = all_reduce_sum(1), leftovers(directory), Checkpointer(directory).restore()
    save(3)
    return raised, left, Checkpointer(directory).restore()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_part_that_cannot_be_written_is_an_error_on_every_rank_and_leaves_nothing(
    size, asynchronous, tmp_path
):
    outcomes = run_caught(fail_to_write, tmp_path, asynchronous, world_size=size)
    for raised, left, after in outcomes:
        assert raised.type == "OSError"
        assert f"not all ranks could read or write their parts: rank {size - 1}: " in raised.text
        assert left == (size, [], {"step": 1})
        assert after == {"step": 3}


# --- made up by somebody who means harm


def with_bytes(metadata, tmp_path):
    metadata.state_dict_metadata["thing.torch.int64"] = BytesStorageMetadata()


def with_path(path):
    def change(metadata, tmp_path):
        for place in metadata.storage_data.values():
            place.relative_path = path.format(tmp_path)

    return change


def replaced(metadata, tmp_path):
    metadata.state_dict_metadata = "x"


FORGED = {
    "bytes": (with_bytes, "'thing.torch.int64' is a BytesStorageMetadata, which might run code"),
    "above": (with_path("../state.pt"), "needs '../state.pt', which is no file in it"),
    "absolute": (with_path("{}/secret"), "which is no file in it"),
    "another": (with_path("other"), "needs 'other', which is no file in it"),
    "replaced": (replaced, "must hold tensors and nothing else, but 'str' object has no"),
}
PICKLES = {
    "a call": lambda path: pickle.dumps(Harm(path)),
    "a function": lambda path: b"cos\nsystem\n(S'touch %s'\ntR." % str(path).encode(),
    "an attribute": lambda path: (
        b"\x80\x04\x8c\x2atorch.distributed.checkpoint.filesystem\x8c\x12FileSystem.rm_file\x93."
    ),
    "a class that does more": lambda path: (
        b"ctorch.distributed.checkpoint.filesystem\nFileSystemWriter\n(S'x'\ntR."
    ),
    "another module": lambda path: b"cantigravity\nx\n.",
    "no metadata": lambda path: pickle.dumps([1]),
    "nothing": lambda path: b"",
    "noise": lambda path: b"\x80\x04" + bytes(range(256)),
}


def save_for_forgers(directory):
    class Own(Thing):
        def state_dict(self):
            return self.tensors

    checkpointer = Checkpointer(directory)
    checkpointer.save(1, thing=1)
    checkpointer.save(2, thing=Own({str(k): v for k, v in tensors().items()}))


def metadata_of(checkpoint):
    return checkpoint / "sharded" / ".metadata"


def forged(change, file, tmp_path):
    metadata = pickle.loads(file.read_bytes())
    change(metadata, tmp_path)
    return pickle.dumps(metadata)


def restore_each(directory):
    found = []
    lines = log_lines()
    for path in sorted(directory.iterdir()):
        values = caught(Checkpointer(path).restore)
        found.append((path.name, values, [line for line in lines if "passed over" in line]))
        lines.clear()
    return found


def test_metadata_that_was_made_up_is_passed_over_and_runs_no_code(tmp_path):
    run(save_for_forgers, tmp_path / "saved", world_size=2)
    for name in (*FORGED, *PICKLES):
        checkpoint = paths(shutil.copytree(tmp_path / "saved", tmp_path / "forged" / name))[-1]
        file = metadata_of(checkpoint)
        if name in FORGED:
            file.write_bytes(forged(FORGED[name][0], file, tmp_path))
        else:
            file.write_bytes(PICKLES[name](tmp_path / "harm"))
        sign(checkpoint)
    for rank, found in enumerate(run(restore_each, tmp_path / "forged", world_size=2)):
        assert len(found) == len(FORGED) + len(PICKLES)
        for name, values, lines in found:
            assert values == {"step": 1, "thing": 1}, name
            if rank == 0:
                why = FORGED[name][1] if name in FORGED else "must hold tensors and nothing else"
                assert why in lines[0]
    assert not (tmp_path / "harm").exists()


def restore(directory):
    return Checkpointer(directory).restore()


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_a_damaged_part_is_passed_over_on_every_rank(file, tmp_path):
    run(save_for_forgers, tmp_path, world_size=2)
    part = paths(tmp_path)[-1] / "sharded" / file
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    expected = {"step": 1, "thing": 1}
    assert run_caught(restore, tmp_path, world_size=2) == [expected] * 2
