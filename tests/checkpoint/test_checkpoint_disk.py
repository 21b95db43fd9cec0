"""A checkpoint is written as a whole or an error on every rank, now and in the background."""

import errno
import os
import shutil
import stat
import sys
import threading
import traceback
from pathlib import Path

import pytest
import torch
from common_checkpoint import Thing, leftovers, limited, paths, save_steps, sharded, whole_steps
from ctrl_c import ctrl_c, until
from on_ranks import caught, run_caught
from torch import nn

from pardata import Checkpointer, all_reduce_sum, rank_zero_call, world
from pardata.checkpoint import _checkpointer
from pardata.checkpoint._checkpointer import BackgroundTask
from pardata.checkpoint._directory import CheckpointDirectory, Retention

LARGE = 1_200_000  # numbers: more bytes than `limited` leaves room for, also in halves


def fill(_, who):
    return limited() if world().rank == who else int


def lose(directory, _):
    elsewhere = directory.with_name("elsewhere")
    rank_zero_call(shutil.move, directory, elsewhere)
    return lambda: rank_zero_call(shutil.move, elsewhere, directory)


def claim(directory, _):
    rank_zero_call(CheckpointDirectory(directory, Retention(3, None)).begin, 1)
    return lambda: rank_zero_call(lambda: [shutil.rmtree(p) for p in directory.glob(".unf*")])


def test_a_checkpoint_is_synced_to_disk_before_it_is_renamed(tmp_path, monkeypatch):
    synced, on_disk = [], os.fsync
    inode = lambda path: path.stat().st_ino  # noqa: E731

    def noted(opened):
        on_disk(opened)
        synced.append(os.fstat(opened).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    save_steps(tmp_path, 1)
    (checkpoint,) = paths(tmp_path)
    *before, last = synced
    assert set(before) == {inode(checkpoint), *map(inode, checkpoint.iterdir())}
    assert last == inode(tmp_path)


def refuse_to_sync(monkeypatch, is_refused, code):
    """Let ``os.fsync`` raise for what has a mode of this kind, as a folder or a file."""
    on_disk = os.fsync

    def of_others(opened):
        if is_refused(os.fstat(opened).st_mode):
            raise OSError(code, os.strerror(code))
        on_disk(opened)

    monkeypatch.setattr(os, "fsync", of_others)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_disk_that_cannot_sync_folders_is_warned_of_once(
    code, asynchronous, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("pardata.environment._logger.logged_once", set())
    refuse_to_sync(monkeypatch, stat.S_ISDIR, code)
    checkpointer = Checkpointer(tmp_path, asynchronous=asynchronous)
    save = lambda step: (checkpointer.save(step), checkpointer.wait())  # noqa: E731
    if code == errno.EIO:
        with pytest.raises(OSError, match=r"Input/output error, while saving step 1"):
            save(1)
        return
    save(1)
    save(2)
    assert whole_steps(tmp_path) == [1, 2]
    (said,) = (line.getMessage() for line in caplog.records if line.levelname == "WARNING")
    assert said.startswith(f"this disk cannot sync folders ([Errno {code}] ")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_that_cannot_be_synced_fails_the_save(code, tmp_path, monkeypatch):
    refuse_to_sync(monkeypatch, stat.S_ISREG, code)
    with pytest.raises(OSError, match="while saving step 1"):
        Checkpointer(tmp_path).save(1)
    assert (whole_steps(tmp_path), leftovers(tmp_path)) == ([], [])


# How it begins, for one who writes, which returns how it ends; and what every rank is told.
GONE = "{} must stay, but is gone: was it removed, or its"
NEWER = "but another one has begun (process"
NO_ROOM = "[Errno 27] File too large, while saving step 2: earlier checkpoints are still in {}"
NO_ROOM_FOR_SHARDS = "not all ranks could read or write their parts: rank 1: "
TROUBLES = {
    "no room": (fill, "OSError", ""),
    "no directory": (lose, "FileNotFoundError", GONE),
    "a newer run": (claim, "RuntimeError", NEWER),
}


def meet_trouble(directory, trouble, kind, asynchronous):
    checkpointer = Checkpointer(directory, asynchronous=asynchronous)
    numbers = torch.ones(LARGE if trouble == "no room" else 9)
    values = {"value": numbers} if kind == "value" else {"thing": Thing({"a": sharded(numbers)})}
    save = lambda step: (checkpointer.save(step, **values), checkpointer.wait())  # noqa: E731
    save(1)
    end = TROUBLES[trouble][0](directory, 0 if kind == "value" else world().size - 1)
    raised = [caught(save, step) for step in (2, 2, 1, 3)]
    is_there, total = directory.exists(), all_reduce_sum(1)
    end()
    state = whole_steps(directory), leftovers(directory), checkpointer.restore().step
    return raised, (is_there, total), state, caught(save, 4), whole_steps(directory)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("size", "kind"), [(1, "value"), (3, "value"), (2, "shards")])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_failed_save_raises_on_every_rank_and_keeps_checkpoints(
    trouble, size, kind, asynchronous, tmp_path
):
    directory = tmp_path / "run"
    job = meet_trouble, directory, trouble, kind, asynchronous
    _, error, text = TROUBLES[trouble]
    fresh = trouble == "no room"
    for raised, during, state, after, steps in run_caught(*job, world_size=size, fresh=fresh):
        assert [each.type for each in raised] == [error] * 4
        assert all(text.format(directory) in each.text for each in raised)
        if trouble == "no room":
            first = NO_ROOM if kind == "value" else NO_ROOM_FOR_SHARDS
            assert raised[0].text.startswith(first.format(directory))
        assert during == (trouble != "no directory", size)
        assert state == ([1], [], 1)
        ends = trouble != "a newer run"
        assert steps == ([1, 4] if ends else [1])
        assert ends or after.type == error


# --- one after the other


def test_the_log_says_of_each_save_where_it_went(tmp_path, caplog):
    with caplog.at_level("INFO", logger="pardata"):
        save_steps(tmp_path, 5, 6, 7)
    for number, record in enumerate(caplog.records):
        text = f"pardata saved step {5 + number} to {tmp_path}, 0.0 MB in 0."
        assert record.getMessage().startswith(text)
    assert number == 2


# --- in the background


def test_nothing_that_changes_before_it_is_written_is_written(tmp_path, monkeypatch):
    gate = threading.Event()

    def held(work, what):
        return BackgroundTask(lambda: (gate.wait(), work()), what)

    monkeypatch.setattr(_checkpointer, "BackgroundTask", held)
    dense, sparse, names = torch.ones(3), torch.eye(3).to_sparse(), {"a"}
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    weights = net.weight.tolist()
    with Checkpointer(tmp_path, asynchronous=True) as checkpointer:
        checkpointer.save(1, dense=dense, sparse=sparse, names=names, net=net, optimizer=optimizer)
        net.weight.data.add_(1)
        optimizer.param_groups[0]["lr"] = 7
        dense.add_(1)
        sparse.coalesce().values().add_(1)
        names.add("b")
        gate.set()
    values = Checkpointer(tmp_path).restore(net=other, optimizer=optimizer).values
    assert (other.weight.tolist(), optimizer.param_groups[0]["lr"]) == (weights, 0.5)
    assert torch.equal(values["dense"], torch.ones(3))
    assert torch.equal(values["sparse"].to_dense(), torch.eye(3))
    assert values["names"] == {"a"}


def calls_of(thread):
    """Return in which calls a thread is, as "file.function"."""
    frames = sys._current_frames()
    if thread.ident not in frames:  # it has just ended
        return set()
    stack = traceback.extract_stack(frames[thread.ident])
    return {f"{Path(line.filename).stem}.{line.name}" for line in stack}


def waits():
    """Return whether this rank is in `wait`, and the others know it.

    Rank 0 waits for its thread then, and another rank for the store's answer.
    """
    if world().is_main:
        return "_checkpointer.join" in calls_of(threading.main_thread())
    return any({"_round.listen", "_client.wait_for"} <= calls_of(t) for t in threading.enumerate())


def is_last_to_press(directory):
    """Return whether this rank may press: rank 0 does as the last, for it ends the wait of all."""
    others = world().size - 1 if world().is_main else 0
    return waits() and len([*directory.glob("out-*")]) >= others


def interrupt_and_save(directory):
    """Press Ctrl-C in `wait`, and save as one does then, while the thread still writes."""
    interrupted, rename = threading.Event(), Path.rename
    again = {"_checkpointer.save", "_checkpointer.wait"}

    def rename_late(path, target):
        if target.name.endswith("2"):
            interrupted.wait(100)
            until(lambda: calls_of(threading.main_thread()) >= again)
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", rename_late)
        checkpointer = Checkpointer(directory, asynchronous=True)
        checkpointer.save(1)
        checkpointer.save(2)
        with ctrl_c(lambda: is_last_to_press(directory)):
            checkpointer.wait()
        (directory / f"out-{world().rank}").touch()
        interrupted.set()
        checkpointer.save(3)
        return checkpointer.steps(), checkpointer.restore().step


@pytest.mark.parametrize("size", [1, 2])
def test_a_save_after_an_interrupted_wait_waits_for_the_writer(size, tmp_path):
    assert run_caught(interrupt_and_save, tmp_path, world_size=size) == [([1, 2, 3], 3)] * size


@pytest.mark.parametrize("begins", [True, False])
def test_a_save_after_an_interrupted_start_waits_for_the_writer(begins, tmp_path, monkeypatch):
    start, rename = threading.Thread.start, Path.rename

    def interrupted(thread):  # as Ctrl-C does in a call of `save`
        if begins:
            start(thread)
        raise KeyboardInterrupt

    def rename_late(path, target):
        if target.name.endswith("1"):  # while the second save waits
            until(lambda: "_directory.begin" in calls_of(threading.main_thread()))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_late)
    checkpointer = Checkpointer(tmp_path, asynchronous=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpointer.save(1)
    checkpointer.save(2)
    checkpointer.wait()
    steps = [1, 2] if begins else [2]
    assert (whole_steps(tmp_path), leftovers(tmp_path)) == (steps, [])


CALLS = {
    "save": lambda checkpointer: checkpointer.save(9),
    "restore": lambda checkpointer: checkpointer.restore(),
    "wait": lambda checkpointer: checkpointer.wait(),
    "exit": lambda checkpointer: checkpointer.__exit__(None, None, None),
}


def fail_in_the_background(directory):
    raised = []
    for call in CALLS.values():
        checkpointer = Checkpointer(directory, asynchronous=True)
        end = limited()
        checkpointer.save(1, value=torch.ones(LARGE))
        checkpointer.__exit__(ValueError, None, None)  # says nothing beside another error
        raised.append(caught(call, checkpointer))
        end()
        checkpointer.wait()  # told once
    checkpointer.save(2)
    checkpointer.wait()
    return raised, checkpointer.restore()


@pytest.mark.parametrize("size", [1, 2])
def test_the_next_call_raises_a_background_error_on_every_rank(size, tmp_path):
    for raised, after in run_caught(fail_in_the_background, tmp_path, world_size=size, fresh=True):
        for error in raised:
            text = "OSError: [Errno 27] File too large, while saving step 1"
            assert str(error).startswith(text)
        assert (after.step, after.values) == (2, {})


def test_of_a_part_of_a_large_tensor_only_the_part_is_written(tmp_path):
    Checkpointer(tmp_path).save(1, part=torch.zeros(10**6)[:3])
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 10**5
