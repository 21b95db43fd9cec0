"""A checkpoint is written as a whole or an error on every rank, now and in the background."""

import shutil
import subprocess
import threading

import pytest
import torch
from checkpoint_zoo import Thing, leftovers, limited, save_steps, sharded, whole_steps
from on_ranks import caught, run_caught
from torch import nn

from pardata import Checkpointer, all_reduce_sum, rank_zero_call, world
from pardata.checkpoint._folder import Attempt

MODES = [False, True]
LARGE = 10_000_000  # numbers: more bytes than `limited` leaves room for


def saving(checkpointer, step, numbers=10):
    checkpointer.save(step, value=torch.full((numbers,), float(step)))
    checkpointer.wait()


# --- the disk


def save_where_there_is_no_room(directory, asynchronous):
    checkpointer = Checkpointer(directory, asynchronous=asynchronous)
    saving(checkpointer, 1)
    end = limited()
    raised = [caught(saving, checkpointer, step, LARGE) for step in (2, 2, 3)]
    state = all_reduce_sum(1), whole_steps(directory), leftovers(directory)
    restored = checkpointer.restore()["step"]
    end()
    saving(checkpointer, 3, LARGE)
    return raised, state, restored, whole_steps(directory)


@pytest.mark.parametrize("asynchronous", MODES)
@pytest.mark.parametrize("size", [1, 3])
def test_where_there_is_no_room_what_was_there_stands_on_every_rank(size, asynchronous, tmp_path):
    outcomes = run_caught(save_where_there_is_no_room, tmp_path, asynchronous, world_size=size)
    for raised, state, restored, after in outcomes:
        assert [error.type for error in raised] == ["OSError"] * 3
        assert raised[0].text == (
            f"[Errno 27] File too large, while saving step 2: the checkpoints before it stand in "
            f"{tmp_path}"
        )
        assert state == (size, [1], [])
        assert restored == 1
        assert after == [1, 3]


@pytest.fixture
def small_disk(tmp_path):
    """A real one of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def save_read_only(directory):
    checkpointer = Checkpointer(directory)
    return caught(saving, checkpointer, 1), checkpointer.restore(), all_reduce_sum(1)


def test_a_disk_that_is_read_only_is_an_error_on_every_rank(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for raised, *rest in run_caught(save_read_only, small_disk / "run", world_size=2):
        assert raised.type == "OSError"
        assert "Read-only file system, while saving step 1" in raised.text
        assert rest == [None, 2]


def lose_the_directory(directory, asynchronous):
    checkpointer = Checkpointer(directory, asynchronous=asynchronous)
    saving(checkpointer, 1)
    rank_zero_call(shutil.move, directory, directory.with_name("elsewhere"))
    raised = [caught(saving, checkpointer, step) for step in (2, 2)]
    there = rank_zero_call(directory.exists)
    rank_zero_call(shutil.move, directory.with_name("elsewhere"), directory)
    saving(checkpointer, 3)
    return raised, there, checkpointer.restore()["step"], whole_steps(directory)


@pytest.mark.parametrize("asynchronous", MODES)
@pytest.mark.parametrize("size", [1, 2])
def test_a_directory_that_disappears_is_told_on_every_rank_and_not_made_again(
    size, asynchronous, tmp_path
):
    for raised, *rest in run_caught(
        lose_the_directory, tmp_path / "run", asynchronous, world_size=size
    ):
        for error in raised:
            assert error.type == "FileNotFoundError"
            assert f"must stay, but {tmp_path / 'run'} is gone" in error.text
        assert rest == [False, 3, [1, 3]]


def lose_it_while_it_is_written(directory):
    checkpointer = Checkpointer(directory, asynchronous=True)
    saving(checkpointer, 1)
    checkpointer.save(2, value=torch.ones(LARGE))
    if world().is_main:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(directory, ignore_errors=True)
    raised = caught(checkpointer.wait)
    return raised, all_reduce_sum(1)


def test_a_directory_that_disappears_under_way_is_told_on_every_rank(tmp_path):
    for raised, total in run_caught(lose_it_while_it_is_written, tmp_path / "run", world_size=2):
        assert raised.type == "FileNotFoundError"
        assert total == 2


# --- two runs


def go_on_as_the_older(directory, kind, asynchronous):
    checkpointer = Checkpointer(directory, asynchronous=asynchronous)
    values = {"value": 1} if kind == "value" else {"thing": Thing([sharded(torch.ones(9)), 1])}
    save = lambda step: (checkpointer.save(step, **values), checkpointer.wait())  # noqa: E731
    save(5)
    rank_zero_call(lambda: Attempt(directory) and None)
    return [caught(save, step) for step in (6, 6, 5, 7)], all_reduce_sum(1)


@pytest.mark.parametrize("asynchronous", MODES)
@pytest.mark.parametrize(("size", "kind"), [(1, "value"), (2, "value"), (2, "shards")])
def test_the_older_run_is_told_on_every_rank_however_often_it_tries(
    size, kind, asynchronous, tmp_path
):
    outcomes = run_caught(go_on_as_the_older, tmp_path, kind, asynchronous, world_size=size)
    for raised, total in outcomes:
        for error in raised:
            assert error.type == "RuntimeError"
            assert "this is attempt 1 and attempt 2 has begun" in error.text
        assert total == size
    assert (whole_steps(tmp_path), leftovers(tmp_path)) == ([5], [])


# --- one after the other


def test_a_step_that_comes_again_or_goes_back_is_the_newest(tmp_path):
    checkpointer = save_steps(tmp_path, 5, 5, 3)
    assert whole_steps(tmp_path) == [5, 5, 3]
    assert checkpointer.restore()["step"] == 3
    checkpointer.save(5, value=7)
    assert checkpointer.restore() == {"step": 5, "value": 7}


def test_the_log_says_what_was_saved(tmp_path, caplog):
    with caplog.at_level("INFO", logger="pardata"):
        save_steps(tmp_path, 5)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"[0/1] saved step 5 to {tmp_path}, 0.0 MB in 0.")


# --- in the background


def change_at_once(directory):
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    best, seen = torch.zeros(300_000), ["a"]
    expected, found = [], []
    with Checkpointer(directory, asynchronous=True, keep=9) as checkpointer:
        for step in range(3):
            expected.append((net.weight.tolist(), optimizer.param_groups[0]["lr"], float(step)))
            checkpointer.save(step, net=net, optimizer=optimizer, best=best, seen=seen)
            with torch.no_grad():
                net.weight.add_(1)
            best.add_(1)
            optimizer.param_groups[0]["lr"] /= 2
            seen.append("b")
    other = nn.Linear(2, 2)
    while steps := whole_steps(directory):
        values = Checkpointer(directory).restore(net=other, optimizer=optimizer)
        found.append((other.weight.tolist(), optimizer.param_groups[0]["lr"], values["best"].max()))
        assert values["best"].min() == values["best"].max()
        assert values["seen"] == ["a", "b", "b"][: steps[-1] + 1]
        rank_zero_call(shutil.rmtree, directory / f"attempt-0001-step-{steps[-1]:09d}")
    return found[::-1] == expected


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_written_is_the_state_at_the_call(size, tmp_path):
    assert run_caught(change_at_once, tmp_path, world_size=size) == [True] * size


def save_many(directory):
    checkpointer = Checkpointer(directory, asynchronous=True)
    most = 0
    for step in range(10):
        checkpointer.save(step, value=torch.ones(100_000))
        names = [thread.name for thread in threading.enumerate()]
        most = max(most, sum(name.startswith("pardata: ") for name in names))
    checkpointer.wait()
    checkpointer.wait()
    return most <= 1, whole_steps(directory)


def test_one_at_a_time_is_written(tmp_path):
    assert run_caught(save_many, tmp_path, world_size=2) == [(True, [7, 8, 9])] * 2


CALLS = {
    "save": lambda checkpointer: checkpointer.save(9),
    "restore": lambda checkpointer: checkpointer.restore(),
    "wait": lambda checkpointer: checkpointer.wait(),
    "export": lambda checkpointer: checkpointer.export("x.pt"),
    "exit": lambda checkpointer: checkpointer.__exit__(None, None, None),
}


def fail_in_the_background(directory):
    raised = []
    for call in CALLS.values():
        checkpointer = Checkpointer(directory, asynchronous=True)
        end = limited()
        checkpointer.save(1, value=torch.ones(LARGE))
        raised.append(caught(call, checkpointer))
        end()
        checkpointer.wait()  # told once
    checkpointer.save(2)
    checkpointer.wait()
    return raised, checkpointer.restore()


@pytest.mark.parametrize("size", [1, 2])
def test_an_error_in_the_background_is_raised_by_the_next_call_on_every_rank(size, tmp_path):
    for raised, after in run_caught(fail_in_the_background, tmp_path, world_size=size):
        for error in raised:
            assert error.type == "OSError"
            assert "File too large, while saving step 1" in error.text
        assert after == {"step": 2}


def leave_by_an_error(checkpointer):
    with checkpointer:
        checkpointer.save(1, value=1)
        message = "training failed"
        raise ArithmeticError(message)


def test_an_error_of_the_block_is_not_hidden(tmp_path):
    with pytest.raises(ArithmeticError, match="training failed"):
        leave_by_an_error(Checkpointer(tmp_path, asynchronous=True))
