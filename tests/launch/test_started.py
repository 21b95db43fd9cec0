"""Traps of starting processes, each one started for real."""

import os
import subprocess
import sys
import time

import pytest
from on_ranks import Raised, caught

CHILD = r"""
import os, pardata
try:
    world = pardata.init()
    # One write: lines of two ranks may be glued together.
    print(f"joined {world.rank} {world.size} {world.launcher}\n", end="", flush=True)
except RuntimeError as error:
    print("refused:", error)
"""

PARENT = r"""
import os, subprocess, sys
import pardata, torch
from pardata import all_reduce_sum, make_loader
from torch.utils.data import Dataset

class Seen(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        here = pardata.world()
        return [here.rank, here.size, here.launcher == "single", all_reduce_sum(1)]

with pardata.init() as world:
    if world.rank == 0:
        child = [sys.executable, "-c", os.environ["CHILD"]]
        print("subprocess", subprocess.run(child, capture_output=True, text=True).stdout)
        out = {**os.environ, "PARDATA_LAUNCHER": "none"}
        print("opted out", subprocess.run(child, capture_output=True, text=True, env=out).stdout)
        again = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 "--nproc-per-node=2", os.environ["SCRIPT"]]
        print("launched", subprocess.run(again, capture_output=True, text=True).stdout)
    pardata.barrier("children are done")
    if (pid := os.fork()) == 0:
        alone = pardata.world().size, pardata.init().size, all_reduce_sum(1)
        print(f"forked {alone}\n", end="", flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    batch = next(iter(make_loader(Seen(), 4, num_workers=1)))
    print(f"worker {[column.tolist() for column in batch]}\n", end="", flush=True)
    pardata.barrier("end")
"""

SECTIONS = """
import pardata
world = pardata.init()
print(f"rank {world.rank} of {world.size}, local {world.local_rank} of {world.local_size}, "
      f"node {world.node_rank} of {world.num_nodes}, {world.launcher}, {world.backend}, "
      f"sum {pardata.all_reduce_sum(world.rank)}", flush=True)
"""


def python(code, **env):
    """Start Python with these variables and return the process."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes, seconds=60):
    """Return exit code, output and errors of each process; none outlives this."""
    deadline = time.monotonic() + seconds
    try:
        parts = [p.communicate(timeout=max(1, deadline - time.monotonic())) for p in processes]
        return [(p.returncode, *part) for p, part in zip(processes, parts, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def torchrun(script, size, short_tmp, **env):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, f"--nproc-per-node={size}", script],
        env={**os.environ, "TMPDIR": short_tmp, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_children_of_a_rank_never_take_its_place(tmp_path, short_tmp):
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)
    script = str(tmp_path / "child.py")
    done = torchrun(tmp_path / "parent.py", 2, short_tmp, CHILD=CHILD, SCRIPT=script)
    assert done.returncode == 0, done.stderr
    assert "subprocess refused: this process inherited the variables of rank 0" in done.stdout
    assert "start it with PARDATA_LAUNCHER=none" in done.stdout
    assert "opted out joined 0 1 single" in done.stdout
    assert "joined 0 2 torchrun" in done.stdout.split("launched")[1]
    assert "joined 1 2 torchrun" in done.stdout.split("launched")[1]
    assert done.stdout.count("forked (1, 1, 1)") == 2
    # Each rank's worker saw itself alone: rank 0 of 1, and its own 1 as the sum.
    assert done.stdout.count("worker [[0, 0], [1, 1], [True, True], [1, 1]]") == 2


def test_plain_python_inside_sbatch_is_a_single_process_at_once():
    batch = {
        "SLURM_JOB_ID": "12",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_JOB_NODELIST": "n[1-2]",
    }
    ((code, out, _),) = finish([python(SECTIONS, **batch)], seconds=30)
    assert code == 0
    assert "rank 0 of 1" in out
    assert "single" in out


def slurm(rank, size, job):
    return {
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": "localhost,other",
        "SLURM_STEP_TASKS_PER_NODE": f"2(x{size // 2})",
    }


def open_mpi(rank, size, _job):
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = zip(names, (rank, size, rank, size), strict=True)
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values}


def mpich(rank, size, _job):
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return {n: str(v) for n, v in zip(names, (rank, size, rank, size), strict=True)}


@pytest.fixture
def free_port():
    # The store of rank 0 opens it a moment later; a launcher has no better way either.
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("variables", "launcher", "nodes"),
    [(slurm, "slurm", 2), (open_mpi, "mpi", 1), (mpich, "mpi", 1)],
)
def test_ranks_of_slurm_and_mpi_join_and_leave_without_a_word(
    variables, launcher, nodes, free_port
):
    size = 4
    processes = [
        python(SECTIONS, MASTER_PORT=free_port, **variables(rank, size, "77"))
        for rank in range(size)
    ]
    for rank, (code, out, errors) in enumerate(finish(processes)):
        assert code == 0, errors
        assert errors == ""
        assert (
            f"rank {rank} of 4, local {rank * nodes % 4 // nodes if nodes == 1 else rank % 2}"
            in out
        )
        assert f"of {nodes}, {launcher}, gloo, sum 6" in out


LATE = """
import sys, time, pardata
from datetime import timedelta
pardata.init(timeout=timedelta(seconds=3))
"""


def test_a_rank_that_never_comes_is_named(free_port):
    env = {"MASTER_PORT": free_port}
    processes = [python(LATE, **env, **slurm(rank, 4, "78")) for rank in (0, 1, 2)]
    for code, _, errors in finish(processes):
        assert code == 1
        assert "TimeoutError: `init` must be reached by every rank, but rank 3 of 4" in errors


UNWINDING = """
import pardata
with pardata.init() as world:
    if world.rank == 0:
        raise ValueError("the reason")
    pardata.barrier("never", timeout=__import__("datetime").timedelta(seconds=60))
"""


def test_an_exception_leaves_at_once_and_torchrun_ends_the_others(tmp_path, short_tmp):
    (tmp_path / "script.py").write_text(UNWINDING)
    started = time.monotonic()
    done = torchrun(tmp_path / "script.py", 2, short_tmp)
    assert done.returncode != 0
    assert "ValueError: the reason" in done.stderr
    assert time.monotonic() - started < 40


def test_caught_sees_system_exit():
    assert isinstance(caught(sys.exit, 3), Raised)
