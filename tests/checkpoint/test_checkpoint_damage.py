"""The newest checkpoint that is whole is read, whatever became of the others; none runs code."""

import logging
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from common_checkpoint import Harm, paths, save_steps, sign
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import log_of
from on_ranks import caught, run_caught

from pardata import Checkpointer, world

FILES = ["state.pt", "manifest.json"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three checkpoints, to be copied."""
    directory = tmp_path_factory.mktemp("saved")
    save_steps(directory, 1, 2, 3)
    return directory


def restored(directory):
    found = Checkpointer(directory).restore()
    assert found.values["value"].tolist() == [found.step] * 50
    return found.step


# What may become of a file, where in it, and which bits and bytes.
damages = st.tuples(
    st.sampled_from(["flip", "cut", "remove", "replace", "swap"]),
    st.floats(0, 1, exclude_max=True), st.integers(0, 7), st.binary(max_size=100),
)  # fmt: skip


def damage(file, how, other):
    kind, place, bit, data = how
    content = bytearray(file.read_bytes())
    at = int(place * len(content))
    if kind == "remove":
        file.unlink()
        return
    if kind == "flip":
        content[at] ^= 1 << bit
    left = {"cut": content[:at], "replace": data, "swap": other.read_bytes()}
    file.write_bytes(left.get(kind, content))


@settings(max_examples=80)
@given(st.dictionaries(st.sampled_from([0, 1]), st.tuples(st.sampled_from(FILES), damages)))
def test_the_newest_that_is_whole_is_restored(saved, damaged):
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        shutil.copytree(saved, directory)
        # The oldest one is whole.
        oldest, *others = paths(directory)
        for index, (file, how) in damaged.items():
            damage(others[index] / file, how, oldest / file)
        # A bit of the manifest's blanks may flip unseen.
        flipped = {i + 2 for i, (file, how) in damaged.items() if (file, how[0]) == FLIPPED}
        whole = {1, 2, 3} - {index + 2 for index in damaged}
        before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        step = restored(directory)
        assert step == max(whole) or step in flipped
        assert {path: path.read_bytes() for path in before} == before


FLIPPED = ("manifest.json", "flip")


def changed(before, after):
    return lambda file: file.write_bytes(file.read_bytes().replace(before, after))


def signed(**facts):
    return lambda checkpoint: sign(checkpoint, **facts)


STATE, MANIFEST = FILES
# What may become of a file of a checkpoint, or of the whole, and what is said of it.
CHANGES = {
    "a file that is gone": (STATE, Path.unlink, "state.pt is missing"),
    "no manifest": (MANIFEST, Path.unlink, "manifest.json is missing"),
    "another size": (STATE, lambda file: file.write_bytes(b"x"), "state.pt has 1 bytes and shou"),
    "another byte": (STATE, changed(b"PK", b"QK"), "the checksum of state.pt is wrong"),
    "another manifest": (MANIFEST, changed(b'"values"', b'"x"'), "the checksum of manifest.json i"),
    "other JSON": (MANIFEST, lambda file: file.write_text("{}"), "manifest.json is damaged"),
    "a deep one": (MANIFEST, lambda file: file.write_text("[" * 60_000), "manifest.json is dam"),
    "a pipe": (STATE, lambda file: (file.unlink(), os.mkfifo(file)), "state.pt is missing"),
    "another format": ("", signed(format=2), "its format is 2, and this pardata reads 1"),
    "another step": ("", lambda path: path.rename(f"{path}"[:-1] + "9"), "it is that of step 3"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_checkpoint_is_skipped_and_the_reason_is_logged(change, saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    file, make, why = CHANGES[change]
    third = paths(directory)[2]
    make(third / file)
    with log_of("pardata", logging.INFO) as log:
        assert restored(directory) == 2
    told, found = log.lines
    assert told.startswith(f"checkpoint {paths(directory)[-1]} was skipped because {why}")
    assert found.startswith(f"pardata restored step 2 of {directory}, saved by 1 process(es) with ")


def test_where_none_is_whole_all_are_listed_on_every_rank(saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    for path in paths(directory):
        (path / "manifest.json").write_text("{}")
    lines = [f"\n  attempt-0001-step-00000000{k}: manifest.json is damaged" for k in (3, 2, 1)]
    for outcome in run_caught(Checkpointer(directory).restore, world_size=2):
        assert str(outcome) == (
            f"RuntimeError: one of the checkpoints in {directory} must be complete, but none is:"
            f"{''.join(lines)}\nPut a copy back, or remove them to begin anew"
        )


def test_what_is_no_checkpoint_is_left_alone(saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    shutil.copytree(paths(directory)[0], directory / "attempt-0009-step-000000001.bak")
    (directory / "attempt-0009-step-000000009").touch()
    (directory / ".unfinished-attempt-0009-step-000000009").mkdir()
    (directory / "notes").touch()
    assert restored(directory) == 3


def test_a_directory_without_checkpoints_gives_nothing_whatever_lies_beside_it(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "seed-1")
    for directory in (tmp_path, tmp_path / "seed-2"):
        with log_of("pardata", logging.INFO) as log:
            found = Checkpointer(directory).restore()
        assert (bool(found), found.step, found.values) == (False, 0, {})
        assert log.lines == [f"there is no checkpoint in {directory}: the run starts from step 0"]
        assert Checkpointer(directory).steps() == []


@pytest.mark.parametrize("size", [1, 2])
def test_restore_at_a_step_loads_it_or_raises(size, saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    (paths(directory)[1] / "state.pt").write_text("")
    for first, second, ninth in run_caught(restore_steps, directory, 1, 2, 9, world_size=size):
        assert (first.step, first.values["value"].tolist()) == (1, [1] * 50)
        text = f"RuntimeError: one of the checkpoints of step 2 in {directory} must be complete"
        assert str(second).startswith(text)
        assert ninth.type == "ValueError"
        assert ninth.text.endswith(f"`at` must be a saved step, but is 9: {directory} has 1, 2, 3")


def restore_steps(directory, *steps):
    checkpointer = Checkpointer(directory)
    assert checkpointer.steps() == [1, 2, 3]
    return [caught(lambda: checkpointer.restore(at=step)) for step in steps]  # noqa: B023


def restore_where_rank_0_alone_sees(directory):
    os.chdir(directory / "elsewhere" if world().rank else directory)
    return [caught(Checkpointer(f"{place}run").restore) for place in ("/proc/self/cwd/", "")]


def test_ranks_must_see_the_same_disk(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    found = run_caught(restore_where_rank_0_alone_sees, tmp_path, world_size=3)
    for unseen, relative in found:
        place = "/proc/self/cwd/run/attempt-0001-step-0"
        text = f"RuntimeError: {place}"
        assert str(unseen).startswith(text)
        assert "is not there for ranks 1, 2: save to a disk of all nodes" in unseen.text
        assert "the same to `Checkpointer.restore`, but `directory` differs:\n" in relative.text
        assert f"directory='{tmp_path}/elsewhere/run'" in relative.text


# --- made up by somebody who means harm


def test_no_code_of_a_checkpoint_runs(saved, tmp_path):
    harm = Harm(tmp_path / "harm")
    for write in (
        lambda file: torch.save({"objects": {"value": harm}, "generators": []}, file),
        lambda file: file.write_bytes(pickle.dumps(harm)),
    ):
        directory = shutil.copytree(saved, tmp_path / "run", dirs_exist_ok=True)
        for path in paths(directory):
            write(path / "state.pt")
            sign(path)
        with pytest.raises(RuntimeError, match="cannot be read without running code, or at all"):
            restored(directory)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("contents", [1, None, [], {}, torch.ones(2)], ids=str)
def test_what_is_not_a_checkpoints_is_passed_over(contents, saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    newest = paths(directory)[2]
    torch.save(contents, newest / "state.pt")
    sign(newest)
    assert restored(directory) == 2
