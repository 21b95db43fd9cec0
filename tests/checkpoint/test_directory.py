"""Two runs in one directory: the newer one writes, the older is told. Names, and what is kept."""

import contextlib
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from common_checkpoint import leftovers, paths, save_steps, whole_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import caught, run_caught

from pardata import Checkpointer
from pardata.checkpoint import _directory as folders
from pardata.checkpoint._directory import (
    CheckpointDirectory,
    CheckpointName,
    Retention,
    checkpoint_names,
)
from pardata.checkpoint._manifest import save


class Writer(CheckpointDirectory):
    """A folder's rank 0, which begins and finishes when it is told to."""

    def __init__(self, directory):
        super().__init__(directory, Retention(2, None))
        self.begun = None

    def act(self, action, step=None):
        """Return the path of the checkpoint that was finished, if one was."""
        self.newest_first(None)  # as a run that restores before its first save
        begun, self.begun = self.begun, None
        if action in ("begin", "write"):
            begun = self.begin(step)
        if action == "begin":
            self.begun = begun
            return None
        if begun is None:
            return None
        if action == "fail":
            with contextlib.suppress(OSError):
                self.finish({"step": self._name.step}, lose_a_part)
            return None
        state = begun / "state.pt"
        text = f"{id(self)} {self._name.step}"
        self.finish({"step": self._name.step}, lambda: {"state.pt": save(text, state)})
        return self.directory / str(self._name)


def lose_a_part():
    raise OSError("not all ranks could write")


# --- names


def test_names_are_sorted_by_number_where_they_outgrow_their_digits(tmp_path):
    all_names = [
        CheckpointName(9999, 10**9 + 1),
        CheckpointName(10000, 5),
        CheckpointName(10000, 10**10),
    ]
    for name in reversed(all_names):
        (tmp_path / str(name)).mkdir()
    assert checkpoint_names(tmp_path) == all_names


# --- one run


@pytest.mark.parametrize(("keep", "kept"), [(1, [12]), (2, [10, 12])])
def test_the_newest_are_kept(keep, kept, tmp_path):
    save_steps(tmp_path, *range(0, 14, 2), keep=keep)
    assert (whole_steps(tmp_path), leftovers(tmp_path)) == (kept, [])


def test_the_newest_checkpoint_is_the_last_one_written(tmp_path):
    checkpointer = save_steps(tmp_path, 5, 5, 3)
    assert (whole_steps(tmp_path), checkpointer.restore().step) == ([5, 5, 3], 3)
    checkpointer.save(5, value=7)
    assert checkpointer.restore().values == {"value": 7}
    assert checkpointer.steps() == [3, 5]
    assert checkpointer.restore(at=5).values == {"value": 7}  # the newest of that step
    save_steps(tmp_path, 2, keep=1)
    assert whole_steps(tmp_path) == [2]


# Values by step, what `keep_best` is, and which steps are kept beside the newest, of step 5.
BEST = {
    "the largest": ([1, 3, 2, 3, 0, 1], "accuracy", [1]),
    "the smallest": ([1.0, 0.5, 2, 3, 4, 5], "-accuracy", [1]),
    "what is not known": ([None, float("nan"), 2, None, None, 1], "accuracy", [2]),
    "nothing known": ([None, float("nan"), None, None, None, None], "accuracy", []),
}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", BEST)
def test_the_best_is_kept_beside_the_newest(name, again, tmp_path):
    values, keep_best, kept = BEST[name]
    for step, value in enumerate(values):
        if again or step == 0:  # as a run that was interrupted
            checkpointer = Checkpointer(tmp_path, keep=1, keep_best=keep_best)
        checkpointer.save(step, accuracy=value)
    assert (whole_steps(tmp_path), leftovers(tmp_path)) == ([*kept, 5], [])


def test_a_best_that_is_damaged_or_never_had_the_value_is_none(tmp_path):
    save_steps(tmp_path, 1)
    checkpointer = Checkpointer(tmp_path, keep=1, keep_best="accuracy")
    checkpointer.save(2, accuracy=9)
    (paths(tmp_path)[-1] / "manifest.json").write_text("{}")
    again = Checkpointer(tmp_path, keep=1, keep_best="accuracy")
    for step in (3, 4, 5):
        again.save(step, accuracy=1)
    assert whole_steps(tmp_path) == [3, 5]


def restore_best(directory):
    for accuracy in (0.9, 0.5):  # the second as a run that resumed from an older step
        checkpointer = Checkpointer(directory, keep=1, keep_best="accuracy")
        checkpointer.save(5, accuracy=accuracy)
    found = [checkpointer.restore(at=at).values["accuracy"] for at in ("best", 5, None)]
    plain, other = Checkpointer(directory), Checkpointer(directory, keep_best="-loss")
    errors = [caught(lambda c=c: c.restore(at="best")) for c in (plain, other)]
    return found, checkpointer.steps(), [str(error) for error in errors]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_best_is_restored_where_its_step_came_again(size, tmp_path):
    for found, steps, errors in run_caught(restore_best, tmp_path, world_size=size):
        assert (found, steps) == ([0.9, 0.5, 0.5], [5])
        told = f"is best: {tmp_path} has 5, without the value of `keep_best`"
        assert all(error.endswith(f"`at` must be a saved step, but {told}") for error in errors)


def test_a_new_attempt_removes_what_the_last_one_was_killed_over(tmp_path):
    (Writer(tmp_path).begin(3) / "sharded").mkdir()
    (tmp_path / ".unfinished-attempt-0001-step-000000001").mkdir()
    (tmp_path / ".unfinished-mine").mkdir()
    save_steps(tmp_path, 3)
    assert leftovers(tmp_path) == [".unfinished-mine"]
    assert [path.name for path in paths(tmp_path)] == ["attempt-0002-step-000000003"]


# --- two runs


@pytest.mark.parametrize("end", ["finish", "fail"])
def test_the_older_of_two_writers_raises_and_writes_nothing(end, tmp_path):
    older, newer = Writer(tmp_path), Writer(tmp_path)
    older.act("write", 1)
    older.act("begin", 2)
    newer.act("write", 1)
    before = sorted(tmp_path.rglob("*"))
    older.begun.mkdir()  # as where the newer one came later, while the older one wrote
    for action, step in ((end, 2), ("begin", 3), ("write", 1), ("write", 9)):
        with pytest.raises(RuntimeError) as raised:
            older.act(action, step)
        assert str(raised.value).startswith(
            f"one run at a time must write to {tmp_path}, but another one has begun (process "
            f"{os.getpid()} on "
        )
        assert "this run is the older one and must end; give each a directory" in str(raised.value)
        assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_removed_once_a_newer_one_has_begun(tmp_path, monkeypatch):
    writer = Writer(tmp_path)
    writer.act("write", 1)
    writer.act("write", 2)
    # It begins when the third one has its name, and the first one is to go.
    monkeypatch.setattr(folders, "sync", lambda _: Writer(tmp_path).begin(1))
    with pytest.raises(RuntimeError, match="this run is the older one and must end"):
        writer.act("write", 3)
    assert [name.step for name in checkpoint_names(tmp_path)] == [1, 2, 3]


def test_a_newer_one_is_above_what_an_older_one_has_begun(tmp_path):
    older, newer = Writer(tmp_path), Writer(tmp_path)
    older.act("begin", 9)
    assert newer.act("write", 1).name == "attempt-0002-step-000000001"


@pytest.mark.parametrize("left", ["", "run"])
def test_the_older_writer_raises_after_the_directory_was_emptied(left, tmp_path):
    directory = tmp_path / "run"
    older, newer = Writer(directory), Writer(directory)
    older.act("write", 1)
    shutil.rmtree(directory)
    (tmp_path / left).mkdir(exist_ok=True)
    newer.act("write", 1)
    with pytest.raises(RuntimeError, match="this run is the older one"):
        older.act("write", 2)
    newer.act("write", 2)


def test_a_run_writes_on_in_a_directory_that_was_emptied(tmp_path):
    directory = tmp_path / "run"
    writer = Writer(directory)
    writer.act("write", 1)
    shutil.rmtree(directory)
    directory.mkdir()
    writer.act("write", 2)
    assert whole_steps(directory) == [2]


def save_at_once(directories, gate, pipe):
    results = []
    for directory in directories:
        checkpointer = Checkpointer(directory)
        gate.wait(60)
        results.append(str(caught(checkpointer.save, 1)))
        gate.wait(60)
    pipe.send(results)


def test_of_runs_that_begin_at_once_exactly_one_saves(tmp_path):
    directories = [tmp_path / str(number) for number in range(40)]
    for directory in directories[20:]:
        save_steps(directory, 1)  # so that there is an owner to replace
    context = multiprocessing.get_context("forkserver")
    (here, there), gate = multiprocessing.Pipe(), context.Barrier(3)
    runs = [context.Process(target=save_at_once, args=(directories, gate, there)) for _ in range(3)]
    for each in runs:
        each.start()
    told = zip(*[here.recv() for _ in runs], strict=True)
    for each in runs:
        each.join()
    for directory, results in zip(directories, told, strict=True):
        saved, *others = sorted(results, key=len)
        assert saved == "None"
        assert all("RuntimeError: one run at a time must write to" in text for text in others)
        assert leftovers(directory) == []
        assert whole_steps(directory) == ([1, 1] if int(directory.name) >= 20 else [1])


def test_a_run_that_saw_nobody_saves_nothing_after_another_until_it_restores(tmp_path):
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    first.save(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"has begun \(process {os.getpid()} on "):
            second.save(2)
    first.save(3)
    assert second.restore().step == 3
    second.save(4)
    with pytest.raises(RuntimeError, match="this run is the older one and must end"):
        first.save(5)
    assert whole_steps(tmp_path) == [1, 3, 4]


def test_a_link_to_a_folder_that_is_not_there_makes_it(tmp_path):
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "disk" / "run")
    assert not Checkpointer(link).restore()
    save_steps(link, 1)
    assert whole_steps(tmp_path / "disk" / "run") == [1]


ACTIONS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["new", "begin", "finish", "write", "fail"])),
    max_size=20,
)


@settings(max_examples=60)
@given(ACTIONS)
def test_however_several_runs_interleave_the_newest_alone_adds_and_removes(actions):
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        writers = [Writer(directory) for _ in range(3)]
        contents, newest = {}, None
        for step, (number, action) in enumerate(actions):
            if action == "new":
                writers[number] = Writer(directory)
                continue
            before = checkpoint_names(directory)
            writer = writers[number]
            claims = writer._last != writer._me
            try:
                finished = writer.act(action, step)
            except RuntimeError:
                assert writer is not newest
                assert checkpoint_names(directory) == before
                continue
            newest = writer if claims and writer._last == writer._me else newest
            assert writer is newest or checkpoint_names(directory) == before
            if finished is not None:
                contents[finished] = f"{id(writer)} {writer._name.step}"
        whole_steps(directory)
        for path in paths(directory):
            assert torch.load(path / "state.pt", weights_only=True) == contents[path]
