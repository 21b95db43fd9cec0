"""The newest checkpoint that is whole is read, whatever has become of the others."""

import os
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoints import log_lines, save_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import run_caught
from test_checkpoint_manifest import manifest_of, sign

from pardata import Checkpointer, world
from pardata.checkpoint._folder import names
from pardata.checkpoint._manifest import _size_and_digest

FILES = ["state.pt", "manifest.json"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three checkpoints, to be copied."""
    directory = tmp_path_factory.mktemp("saved")
    save_steps(directory, 1, 2, 3)
    return directory


def paths(directory):
    return [directory / str(name) for name in names(directory)]


def restored(directory):
    found = Checkpointer(directory).restore()
    assert found["value"].tolist() == [found["step"]] * 50
    return found["step"]


# What may become of a file.
damages = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(0, 7)),
    st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True)),
    st.tuples(st.just("remove")),
    st.tuples(st.just("replace"), st.binary(max_size=100)),
    st.tuples(st.just("swap")),
)


def damage(file, how, other):
    kind, *details = how
    content = bytearray(file.read_bytes())
    if kind == "flip":
        content[int(details[0] * len(content))] ^= 1 << details[1]
    elif kind == "cut":
        content = content[: int(details[0] * len(content))]
    elif kind == "replace":
        content = details[0]
    elif kind == "swap":
        content = other.read_bytes()
    file.write_bytes(content)
    if kind == "remove":
        file.unlink()


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from([1, 2]), st.tuples(st.sampled_from(FILES), damages)))
def test_the_newest_that_is_whole_is_restored(saved, damaged):
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        shutil.copytree(saved, directory)
        before = [path.read_bytes() for path in sorted(saved.rglob("*.pt"))]
        for index, (file, how) in damaged.items():
            path = paths(directory)[index]
            damage(path / file, how, paths(directory)[0] / file)
        # A bit of the manifest's blanks may flip unseen.
        harmless = {
            index + 1 for index, (file, how) in damaged.items() if (file, how[0]) == FLIPPED
        }
        step = restored(directory)
        whole = {1, 2, 3} - {index + 1 for index in damaged}
        assert step == max(whole) or step in harmless
        assert [path.read_bytes() for path in sorted(saved.rglob("*.pt"))] == before


FLIPPED = ("manifest.json", "flip")


def test_it_is_said_which_were_passed_over_and_why(saved, tmp_path, caplog):
    directory = shutil.copytree(saved, tmp_path / "run")
    _, second, third = paths(directory)
    (second / "state.pt").write_bytes((third / "state.pt").read_bytes())
    (third / "state.pt").unlink()
    with caplog.at_level("INFO", logger="pardata"):
        assert restored(directory) == 1
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == [
        f"[0/1] passed over the checkpoint {third}: state.pt is missing",
        f"[0/1] passed over the checkpoint {second}: the checksum of state.pt is wrong",
    ]
    assert lines[2].startswith(
        f"[0/1] restored step 1 of {directory}, saved by 1 process(es) with torch "
    )


def restore_and_log(directory):
    lines = log_lines()
    return Checkpointer(directory).restore(), [line for line in lines if "passed" in line]


def test_where_none_is_whole_all_are_listed_on_every_rank(saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    for path in paths(directory):
        (path / "manifest.json").write_text("{}")
    for outcome in run_caught(restore_and_log, directory, world_size=2):
        assert outcome.type == "RuntimeError"
        lines = [f"\n  attempt-0001-step-00000000{k}: manifest.json is damaged" for k in (3, 2, 1)]
        assert outcome.text == (
            f"one of the checkpoints in {directory} must be whole, but none is:{''.join(lines)}\n"
            f"Put a copy back, or remove them to begin anew"
        )


def test_all_ranks_restore_the_same_one_and_rank_0_says_which_it_passed_over(saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    (paths(directory)[2] / "state.pt").write_text("")
    (_, lines), *others = run_caught(restore_and_log, directory, world_size=3)
    assert len(lines) == 1
    assert [(found["step"], lines) for found, lines in others] == [(2, [])] * 2


def test_what_is_no_checkpoint_is_left_alone(saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    shutil.copytree(paths(directory)[0], directory / "attempt-0009-step-000000001.bak")
    (directory / "attempt-0009-step-000000009").touch()
    (directory / ".unfinished-attempt-0009-step-000000009").mkdir()
    (directory / "notes").touch()
    assert restored(directory) == 3


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    paths(directory)[0].rename(directory / "attempt-0001-step-000000009")
    assert restored(directory) == 3
    shutil.rmtree(paths(directory)[0])
    shutil.rmtree(paths(directory)[0])
    with pytest.raises(RuntimeError, match="step-000000009: it is that of step 1"):
        restored(directory)


def test_a_directory_without_checkpoints_gives_none(tmp_path):
    assert Checkpointer(tmp_path).restore() is None
    assert Checkpointer(tmp_path / "nowhere").restore() is None


def restore_of_one_that_sees_nothing(directory):
    if world().rank:
        os.chdir(directory / "elsewhere")
    else:
        os.chdir(directory)
    return Checkpointer("run").restore()


def test_ranks_must_see_the_same_disk(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    outcomes = run_caught(restore_of_one_that_sees_nothing, tmp_path, world_size=3)
    assert [outcome.type for outcome in outcomes] == ["RuntimeError", *["FileNotFoundError"] * 2]
    for outcome in outcomes:
        assert "every rank must see the checkpoints, but run/attempt-0001-step-0" in outcome.text
        assert "is not there for this one: save to a disk that all nodes share" in outcome.text


# --- made up by somebody who means harm


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def forge(path, contents):
    """Put other contents into a checkpoint, with the right checksums."""
    torch.save(contents, path / "state.pt")
    manifest = manifest_of(path)
    sign(path, {**manifest, "files": {"state.pt": _size_and_digest(path / "state.pt")}})


def test_no_code_of_a_checkpoint_runs(saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    for path in paths(directory):
        forge(path, {"objects": {"value": Harm(tmp_path / "harm")}, "generators": []})
    with pytest.raises(RuntimeError, match="cannot be read without running code, or at all"):
        restored(directory)
    for path in paths(directory):
        (path / "state.pt").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
        manifest = manifest_of(path)
        sign(path, {**manifest, "files": {"state.pt": _size_and_digest(path / "state.pt")}})
    with pytest.raises(RuntimeError, match="cannot be read without running code, or at all"):
        restored(directory)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "contents",
    [1, None, [], {}, {"objects": 1, "generators": []}, {"objects": {}, "generators": []},
     {"objects": {"value": 1}, "generators": 3}, torch.ones(2),
     {"objects": {"value": {"pardata: a sharded tensor": ["x"]}}, "generators": []}],
    ids=str,
)  # fmt: skip
def test_what_is_not_a_checkpoints_is_passed_over(contents, saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    forge(paths(directory)[2], contents)
    assert restored(directory) == 2


def test_contents_that_the_manifest_does_not_vouch_for_are_not_read(saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    sign(paths(directory)[2], {**manifest_of(paths(directory)[2]), "files": {}})
    assert restored(directory) == 2


@pytest.mark.parametrize(
    "states", [[1], [{}], [{"python": 1}], [{"python": [3, [1] * 625, None], "torch": [1]}]]
)
def test_states_of_generators_that_are_none_are_an_error(states, saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    forge(paths(directory)[2], {"objects": {"value": 1}, "generators": states})
    with pytest.raises(RuntimeError, match="what was saved of them is nothing of theirs"):
        Checkpointer(directory).restore()


def test_a_mark_without_its_tensor_is_passed_over(saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / "run")
    value = {"pardata: a sharded tensor": "value"}
    forge(paths(directory)[2], {"objects": {"value": value}, "generators": []})
    assert restored(directory) == 2
