"""The trial run: what it finds where all is well, and where it is not."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from on_ranks import run_caught

from pardata import world
from pardata.doctor import _trial as _doctor_check
from pardata.doctor._finding import ERROR, OK, WARNING
from pardata.doctor._trial import agreement, left_behind, trial, trial_of_two

SHM = Path("/dev/shm")
needs_shm = pytest.mark.skipif(not SHM.exists(), reason="no /dev/shm here")


def _trial():
    return list(trial(world(), 60)), os.getpid()


@needs_shm
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_step_is_right_at_every_size_and_rank_0_measures(size):
    for rank, (findings, pid) in enumerate(run_caught(_trial, world_size=size, timeout=100)):
        assert {finding.status for finding in findings} == {OK}
        names = [finding.name for finding in findings]
        measures = ["latency", "bandwidth"] if rank == 0 else []
        assert names == ["sum", "broadcast", *measures, "shared memory"]
        values = {f.name: f.value for f in findings if f.value is not None}
        assert list(values) == measures
        assert all(value > 0 for value in values.values())
        assert findings[-1].text == "4 MiB came from a worker, nothing is left"
        assert left_behind(pid, SHM) == []


def test_two_processes_are_started_for_a_trial_in_one():
    findings = trial_of_two(100)
    assert {finding.status for finding in findings} == {OK}
    names = [finding.name for finding in findings if finding.name != "GPUs"]
    assert names == [
        "two processes", "sum", "broadcast", "latency", "bandwidth", "shared memory",
    ]  # fmt: skip
    assert findings[0].text.startswith("started, met over TCP on the CPU and left, in ")


def test_processes_that_cannot_talk_are_an_error_and_not_an_exception(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    (finding,) = trial_of_two(100)
    assert (finding.name, finding.status) == ("two processes", ERROR)
    assert "no-such-one" in finding.text
    assert "GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME for GPUs) names the interface" in finding.cure
    assert "\n" not in finding.text


def test_a_trial_that_does_not_end_in_time_is_an_error():
    (finding,) = trial_of_two(0.01)
    assert finding.status == ERROR
    assert finding.text.startswith("all 2 ranks must finish within 0.01 s, but rank ")
    assert "\n" not in finding.text  # no stack of a process


@pytest.mark.parametrize(("got", "status"), [(6, OK), (7, ERROR), (float("nan"), ERROR)])
def test_a_wrong_result_is_an_error(got, status):
    finding = agreement("sum", got, 6)
    assert finding.status == status
    if status == ERROR:
        assert finding.text == f"the result must be 6, but is {got}"
        assert finding.cure.startswith("take this host out and test its memory")


def _wrong_trial():
    """Let rank 1 be a machine that adds wrongly."""
    right = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        result = right(tensor, *args, **kwargs)
        if world().rank == 1:
            tensor[...] = torch.where(tensor == 3, 4.0, tensor)
        return result

    dist.all_reduce = all_reduce
    return next(trial(world(), 60))


def test_the_sum_is_looked_at_on_every_rank():
    good, bad = run_caught(_wrong_trial, world_size=2)
    assert good.status == OK
    assert bad.status == ERROR
    assert bad.text == "the result must be 3, but is 4"


def _left_in(directory):
    _doctor_check.left_behind = lambda pid, _: left_behind(pid, directory)
    made = _doctor_check._Made.__getitem__

    def forgetful(self, index):
        (directory / f"torch_{os.getpid()}_1_0").touch()
        return made(self, index)

    _doctor_check._Made.__getitem__ = forgetful
    return list(trial(world(), 60))[-1]


@pytest.mark.skipif(
    multiprocessing.get_all_start_methods()[0] != "fork", reason="workers would import it anew"
)
def test_what_a_worker_leaves_behind_is_a_warning(tmp_path):
    (finding,) = run_caught(_left_in, tmp_path, world_size=1)
    (file,) = tmp_path.iterdir()
    assert finding.status == WARNING
    assert finding.text == f"a worker's tensor came, but {file.name} is left in /dev/shm"
    assert finding.cure.startswith("rm /dev/shm/torch_")


def test_only_the_files_of_that_process_are_looked_for(tmp_path):
    for name in ("torch_12_9_0", "torch_12_8_1", "torch_123_9_0", "sem.12"):
        (tmp_path / name).touch()
    assert left_behind(12, tmp_path) == ["torch_12_8_1", "torch_12_9_0"]
    assert left_behind(1, tmp_path) == []
