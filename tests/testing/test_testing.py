"""`pardata.testing.run`: results, failures, and that nothing hangs or is left behind."""

import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launched import slurm_variables, torchrun_variables

import pardata
from pardata.testing import _run as _running
from pardata.testing import run

SIZES = [1, 2, 3, 4]


def report(*args):
    here = pardata.world()
    return here.rank, here.size, here.launcher, dist.get_backend(), args


@pytest.mark.parametrize("size", SIZES)
def test_each_ranks_result_comes_back_in_rank_order(size):
    results = run(report, "a", [1], world_size=size)
    assert results == [(rank, size, "existing", "gloo", ("a", [1])) for rank in range(size)]


def test_two_processes_are_the_default():
    assert run(max, 1, 2) == [2, 2]


def use_the_group():
    here = pardata.init()
    total = torch.ones(2) * here.rank
    dist.all_reduce(total)
    again = pardata.init()
    return here == again, here.local_rank, here.local_size, here.num_nodes, total.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_the_group_works_and_init_adopts_it(size):
    total = float(sum(range(size)))
    expected = [(True, rank, size, 1, [total] * 2) for rank in range(size)]
    assert run(use_the_group, world_size=size) == expected


def send_tensors(tensor):
    return tensor + pardata.world().rank


def test_tensors_travel_both_ways():
    sent = torch.arange(3)
    results = run(send_tensors, sent)
    assert [result.tolist() for result in results] == [[0, 1, 2], [1, 2, 3]]
    assert sent.tolist() == [0, 1, 2]


def each_rank_computes_on_one_thread():
    return torch.get_num_threads(), multiprocessing.current_process().daemon


def test_each_rank_computes_on_one_thread_and_may_have_children():
    assert run(each_rank_computes_on_one_thread) == [(1, False)] * 2


@pytest.mark.parametrize("size", [0, -1, 1.0, "2", None, True])
def test_a_world_size_that_is_no_positive_integer_is_refused(size):
    fragment = f"`world_size` must be a positive integer, but is {size!r}"
    with pytest.raises(ValueError, match=re.escape(fragment)):
        run(report, world_size=size)


@pytest.mark.parametrize("job", [(lambda: 1,), (report, threading.Lock())], ids=["fn", "args"])
def test_what_does_not_pickle_is_refused(job):
    fragment = "`fn` and its arguments must be importable and picklable, but are not: "
    with pytest.raises(TypeError, match=fragment):
        run(*job)


class Unpicklable(Exception):  # noqa: N818  # named for what it is
    """Needs two arguments, and pickle gives it one."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


def fail(kind, *ranks):
    rank = pardata.world().rank
    if rank in ranks:
        if kind is Unpicklable:
            raise Unpicklable(rank, "the reason")
        message = f"the reason on rank {rank}"
        raise kind(message)
    # The others are in a collective that never ends.
    dist.barrier()


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize(("size", "ranks"), [(1, [0]), (2, [1]), (3, [0]), (3, [1, 2])])
def test_an_exception_on_one_rank_comes_back_with_its_traceback_and_rank(kind, size, ranks):
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        run(fail, kind, *ranks, world_size=size)
    assert time.monotonic() - started < 30
    rank = int(str(caught.value)[-1])
    assert rank in ranks
    assert str(caught.value) == f"the reason on rank {rank}"
    origin = str(caught.value.__cause__)
    assert origin.startswith(f"raised on rank {rank} in `run`:\n\nTraceback")
    assert "in fail" in origin


def test_an_exception_that_does_not_pickle_comes_back_as_text():
    with pytest.raises(RuntimeError) as caught:
        run(fail, Unpicklable, 1)
    assert str(caught.value) == "rank 1 failed in `run`: Unpicklable: 1: the reason"
    assert "in fail" in str(caught.value.__cause__)


def die(rank):
    if pardata.world().rank == rank:
        os._exit(9)
    dist.barrier()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_is_named_with_its_exit_code(rank):
    text = f"rank {rank} failed in `run`: ProcessDied: the process ended with exit code 9"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        run(die, rank)


def return_a_lambda():
    return lambda: None


def test_a_result_that_does_not_pickle_is_an_error():
    with pytest.raises(Exception, match=r"(?i)pickle"):
        run(return_a_lambda)


def stay_away(pid_file):
    if pardata.world().rank == 1:
        Path(pid_file).write_text(str(os.getpid()))
        where_rank_1_sleeps()


def where_rank_1_sleeps():
    time.sleep(60)


def test_ranks_that_do_not_finish_are_named_with_where_they_were_and_ended(tmp_path):
    with pytest.raises(TimeoutError) as caught:
        run(stay_away, str(tmp_path / "pid"), timeout=2)
    text = str(caught.value)
    assert text.startswith("all 2 ranks must finish within 2 s, but rank 0, 1 did not")
    assert "rank 1 was here:\n" in text
    assert "in where_rank_1_sleeps" in text
    assert "in barrier" in text.split("rank 1 was here", maxsplit=1)[0]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def leave_one_stuck():
    if pardata.world().rank == 0:
        raise ValueError("the reason")  # noqa: EM101, TRY003  # the text is the test
    time.sleep(60)


def test_a_rank_that_is_stuck_because_another_failed_does_not_hide_why(monkeypatch):
    monkeypatch.setattr(_running, "_GRACE", 0.5)
    started = time.monotonic()
    with pytest.raises(ValueError, match="the reason"):
        run(leave_one_stuck)
    assert time.monotonic() - started < 20


def read_environment(*names):
    return [os.environ.get(name) for name in names]


def test_the_environment_of_now_is_passed_on_and_env_added_on_every_rank(monkeypatch):
    run(max, 1, 2, world_size=1)  # the server exists from here on
    monkeypatch.setenv("PARDATA_TEST_VALUE", "now")
    names = ("PARDATA_TEST_VALUE", "PARDATA_TEST_MORE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    results = run(read_environment, *names, env={"PARDATA_TEST_MORE": "x"})
    assert results == [["now", "x", "0", "2"], ["now", "x", "1", "2"]]
    results = run(read_environment, *names, env={"PARDATA_TEST_VALUE": "other"}, world_size=1)
    assert results == [["other", None, "0", "1"]]
    assert "PARDATA_TEST_MORE" not in os.environ


MPI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
RAY = {"NODE_RANK": "7"}


@pytest.mark.parametrize(
    "inherited",
    [
        torchrun_variables(1, 5, 29511, GROUP_RANK="3"),
        slurm_variables(1, 5, 29511),
        MPI,
        RAY,
        {"PARDATA_JOINED": "1 torchrun:0/2@h:1"},
        {"PARDATA_LAUNCHER": "none"},
    ],
    ids=["torchrun", "slurm", "mpich", "ray", "joined", "none"],
)
def test_the_launcher_of_the_test_runner_is_not_inherited(monkeypatch, inherited):
    for name, value in inherited.items():
        monkeypatch.setenv(name, value)
    kept = {"MASTER_ADDR", "MASTER_PORT"}  # these alone make nobody a rank
    own = {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}  # what `run` itself says
    names = set(inherited) - kept - own
    assert run(read_environment, *names) == [[None] * len(names)] * 2
    worlds = run(describe_world)
    assert worlds == [(rank, 2, rank, 2, 0, 1) for rank in range(2)]


def describe_world():
    here = pardata.world()
    return (
        *(here.rank, here.size, here.local_rank, here.local_size),
        *(here.node_rank, here.num_nodes),
    )


def test_env_can_opt_out_on_purpose():
    assert run(describe_world, env={"PARDATA_LAUNCHER": "none"}) == [(0, 1, 0, 1, 0, 1)] * 2


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    children = set(multiprocessing.active_children())
    run(max, 1, 2)
    with pytest.raises(ValueError, match="the reason"):
        run(fail, ValueError, 0)
    assert list(tmp_path.iterdir()) == []
    assert set(multiprocessing.active_children()) == children


def test_the_test_process_itself_joins_nothing():
    run(max, 1, 2)
    assert not dist.is_initialized()
    assert pardata.world().size == 1


def test_without_a_forkserver_processes_are_spawned(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert _running._context().get_start_method() == "spawn"


def run_inside():
    return run(report, world_size=1) if pardata.world().rank == 0 else None


def test_a_run_inside_a_rank_works():
    first, second = run(run_inside)
    assert first == [(0, 1, "existing", "gloo", ())]
    assert second is None


def test_a_script_from_standard_input_is_told_to_become_a_file():
    script = "from pardata.testing import run; run(max, 1, 2)"
    done = subprocess.run(
        [sys.executable],
        input=script,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "`run` must be called from a file or a notebook" in done.stderr
    assert "the script is '<stdin>': save it as a file first" in done.stderr


def test_a_function_of_no_file_is_told_to_become_one_of_a_file():
    # As in a notebook's cell, or at the prompt.
    script = "from pardata.testing import run\ndef inside(): pass\nrun(inside)"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (
        "TypeError: `fn` must be importable by the processes that run it, but 'inside' is defined "
        "in a notebook or an interactive session: write it to a file, in a notebook with "
        "%%writefile, and import it"
    ) in done.stderr
