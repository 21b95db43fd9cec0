"""`pardata.testing.run`: results, failures, and that nothing hangs or is left behind."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import slurm_variables, torchrun_variables

import pardata
from pardata.testing import _run as _running
from pardata.testing import run


def described():
    here = pardata.world()
    return here.rank, here.size, here.local_rank, here.local_size, here.node_rank, here.num_nodes


def report(tensor, *args):
    here = pardata.init()
    total = torch.ones(2) * here.rank
    dist.all_reduce(total)
    is_adopted = pardata.init() == here and here.launcher == "existing"
    threads = torch.get_num_threads(), multiprocessing.current_process().daemon
    return described(), is_adopted, total.tolist(), threads, (tensor + here.rank).tolist(), args


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_rank_joins_a_group_and_returns_its_result(size):
    total = [float(sum(range(size)))] * 2
    expected = [
        ((rank, size, rank, size, 0, 1), True, total, (1, False), [rank, rank + 1], ("a", [1]))
        for rank in range(size)
    ]
    assert run(report, torch.arange(2), "a", [1], world_size=size) == expected
    assert not dist.is_initialized()  # this process joins nothing


class Unpicklable(Exception):  # noqa: N818  # named for what it is
    """Needs two arguments, and pickle gives it one."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


def fail(kind, *ranks):
    if (rank := pardata.world().rank) in ranks:
        raise kind("the reason on rank", rank)
    # The others are in a collective that never ends.
    dist.barrier()


@pytest.mark.parametrize(
    ("kind", "size", "ranks"),
    [(SystemExit, 1, [0]), (KeyboardInterrupt, 2, [1]), (ValueError, 3, [1, 2])],
)
def test_an_exception_on_one_rank_comes_back_with_its_traceback_and_rank(kind, size, ranks):
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        run(fail, kind, *ranks, world_size=size)
    assert time.monotonic() - started < 30
    text, rank = caught.value.args
    assert text == "the reason on rank"
    assert rank in ranks
    origin = str(caught.value.__cause__)
    assert origin.startswith(f"raised on rank {rank} in `run`:\n\nTraceback")
    assert "in fail" in origin


def die(rank):
    if pardata.world().rank == rank:
        os._exit(9)
    dist.barrier()


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ((fail, Unpicklable, 1), "test_run.Unpicklable: the reason on rank: 1"),
        ((die, 1), "ProcessDied: the process ended with exit code 9, without a word"),
    ],
)
def test_a_lost_exception_is_raised_as_text_with_its_rank(job, says):
    with pytest.raises(RuntimeError) as caught:
        run(*job)
    assert str(caught.value) == f"rank 1 failed in `run`: {says}"
    assert "in fail" in str(caught.value.__cause__) or job[0] is die


def stay_away(pid_file):
    if pardata.world().rank == 1:
        Path(pid_file).write_text(str(os.getpid()))
        where_rank_1_sleeps()


def where_rank_1_sleeps():
    time.sleep(60)


def test_unfinished_ranks_are_named_with_their_stack_and_ended(tmp_path):
    with pytest.raises(TimeoutError) as caught:
        run(stay_away, str(tmp_path / "pid"), timeout=6)  # they are looked for after 5 s
    text = str(caught.value)
    assert text.startswith("all 2 ranks must finish within 6 s, but rank 0, 1 did not")
    assert "rank 1 was here:\n" in text
    assert "in where_rank_1_sleeps" in text
    assert "in barrier" in text.split("rank 1 was here", maxsplit=1)[0]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def leave_one_stuck():
    if pardata.world().rank == 0:
        raise ValueError("the reason")  # the text is the test
    time.sleep(60)


def test_a_rank_that_is_stuck_because_another_failed_does_not_hide_why(monkeypatch):
    monkeypatch.setattr(_running, "_GRACE", 0.5)
    started = time.monotonic()
    with pytest.raises(ValueError, match="the reason"):
        run(leave_one_stuck)
    assert time.monotonic() - started < 20


def read_environment(*names):
    return [os.environ.get(name) for name in names]


def test_the_current_environment_and_env_reach_every_rank(monkeypatch):
    run(max, 1, 2, world_size=1)  # the server exists from here on
    monkeypatch.setenv("PARDATA_TEST_VALUE", "now")
    monkeypatch.setenv("PARDATA_TEST_OTHER", "now")
    names = ("PARDATA_TEST_VALUE", "PARDATA_TEST_OTHER", "PARDATA_TEST_MORE", "LOCAL_RANK")
    found = run(
        read_environment, *names, env={"PARDATA_TEST_OTHER": "other", "PARDATA_TEST_MORE": "x"}
    )
    assert found == [["now", "other", "x", "0"], ["now", "other", "x", "1"]]
    assert "PARDATA_TEST_MORE" not in os.environ


MPI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PARDATA = {"PARDATA_JOINED": "1 torchrun:0/2@h:1", "PARDATA_LAUNCHER": "none", "NODE_RANK": "7"}


def test_the_launcher_of_the_test_runner_is_not_inherited(monkeypatch):
    launchers = torchrun_variables(1, 5, 29511), slurm_variables(1, 5, 29511), MPI, PARDATA
    inherited = {name: value for env in launchers for name, value in env.items()}
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    # The first two alone make nobody a rank, the others `run` itself sets.
    names = {*inherited} - {"MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    assert run(read_environment, *names) == [[None] * len(names)] * 2
    assert run(described) == [(rank, 2, rank, 2, 0, 1) for rank in range(2)]  # two by default
    assert run(described, env={"PARDATA_LAUNCHER": "none"}) == [(0, 1, 0, 1, 0, 1)] * 2


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    children = set(multiprocessing.active_children())
    run(max, 1, 2)
    with pytest.raises(ValueError, match="the reason"):
        run(fail, ValueError, 0)
    assert list(tmp_path.iterdir()) == []
    assert set(multiprocessing.active_children()) == children


def run_inside():
    return run(described, world_size=1) if pardata.world().rank == 0 else None


def test_a_run_inside_a_rank_works():
    assert run(run_inside) == [[(0, 1, 0, 1, 0, 1)], None]
