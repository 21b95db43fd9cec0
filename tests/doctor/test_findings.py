"""What the doctor says of launchers and of a machine: limits on both of their sides, and cures."""

import os
import resource
import socket
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from launched import slurm_variables, torchrun_variables
from on_ranks import run_caught
from pretended import accelerators

import pardata
from pardata import world
from pardata.doctor._report import ERROR, OK, WARNING, Finding, found_error
from pardata.doctor._surroundings import (
    examine_launcher,
    own_address,
    shared_memory,
    shared_package,
    surroundings,
)
from pardata.ranks._launcher import LAUNCHERS, Launch, Launcher, detect, launcher_text
from pardata.ranks._machine import usable_cores
from pardata.testing._run import _environment

MIB, GIB = 2**20, 2**30


def found(name, here=None):
    """Return what is said of `name` on this very machine, from among all findings."""
    return next(finding for finding in surroundings(here or world()) if finding.name == name)


def check(finding, status, text, cure=""):
    """Compare a finding with its status, and with how its text and its cure begin."""
    assert finding.status == status
    assert finding.text.startswith(text)
    assert finding.cure.startswith(cure)
    assert bool(finding.cure) == (status != OK)


# --- launchers

BATCH_SHELL = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SHELL = "SLURM_PROCID, SLURM_LOCALID, SLURM_JOB_ID (SLURM)"
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MPI = "PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS"
OPEN_MPI = {f"OMPI_COMM_WORLD_{n}": "1" for n in ("RANK", "LOCAL_RANK")}
OPEN_MPI |= {f"OMPI_COMM_WORLD_{n}": "2" for n in ("SIZE", "LOCAL_SIZE")}
PORT = {"MASTER_PORT": "5"}
TORCHRUN, SLURM = torchrun_variables(1, 3, 5), slurm_variables(1, 2, 5)
STEP_OF_ONE = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
SAYS = "PARDATA_LAUNCHER"


@pytest.mark.parametrize(
    ("env", "chosen", "ignored"),
    [
        ({"MASTER_ADDR": "n1"}, "none: a single process", None),  # an address names no launcher
        (TORCHRUN, "torchrun: 3 processes, to meet at 127.0.0.1:5; from RANK, WORLD_SIZE, ", None),
        (torchrun_variables(0, 1, 5), "torchrun: 1 process, to meet at ", None),
        (SLURM, "SLURM: 2 processes, to meet at localhost:5; from SLURM_PROCID, ", None),
        (OPEN_MPI | PORT, "Open MPI: 2 processes, to meet at 127.0.0.1:5; from OMPI_COMM_", None),
        (MPICH | PORT, "MPICH: 2 processes, to meet at 127.0.0.1:5; from PMI_RANK, ", None),
        (TORCHRUN | BATCH_SHELL, "torchrun: 3", SHELL),
        (SLURM | {"RANK": "1"}, "SLURM: 2", "RANK (torchrun)"),
        (
            SLURM | TORCHRUN | {SAYS: "slurm"},
            "SLURM, as PARDATA_LAUNCHER=slurm says: 2",
            "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (torchrun)",
        ),
        (BATCH_SHELL | {SAYS: "none"}, "none, as PARDATA_LAUNCHER=none says: a single", SHELL),
        (MPICH | STEP_OF_ONE, "none: a single process", f"{MPI} (MPICH): of a step of one"),
        (BATCH_SHELL | {"SLURM_NTASKS": "1"}, "none: a single process", f"{SHELL}: of the shell "),
    ],
)
def test_a_launcher_is_named_with_its_variables_and_those_that_do_not_count(env, chosen, ignored):
    launch, (first, *others) = examine_launcher(env)
    assert launch is not None
    check(first, OK, chosen)
    assert {(finding.name, finding.status) for finding in others} <= {("ignored", OK)}
    assert bool(others) == (ignored is not None)
    assert ignored is None or any(finding.text.startswith(ignored) for finding in others)


def test_the_shell_of_a_job_of_several_tasks_is_told_to_use_srun():
    _, (_, ignored) = examine_launcher(BATCH_SHELL | {"SLURM_NTASKS": "4"})
    check(ignored, WARNING, f"{SHELL}: of the shell of a job", "start the script with srun, to be")


@pytest.mark.parametrize(
    ("env", "says", "seen"),
    [
        (SLURM | {"RANK": "0"}, "`RANK` must be 1, as SLURM says, but is 0: unset it, or choose ",
         "RANK (torchrun); SLURM_PROCID"),
        (torchrun_variables(0, 2, 99999) | MPICH,
         "`MASTER_PORT` must be between 1 and 65535, but is 99999: correct it, or set PARDATA_LAUN",
         "LOCAL_WORLD_SIZE (torchrun); PMI_RANK"),
    ],
)  # fmt: skip
def test_wrong_variables_are_an_error_with_its_cure_and_all_that_is_there(env, says, seen):
    launch, (wrong, variables) = examine_launcher(env)
    assert launch is None
    assert wrong.status == ERROR
    assert ": ".join(filter(None, wrong[1:3])).startswith(says)
    check(variables, OK, "")
    assert seen in variables.text


# --- the machine


def test_each_thing_is_named_once_and_every_complaint_has_a_cure():
    findings = list(surroundings(world()))
    assert len({finding.name for finding in findings}) == len(findings)
    assert all(finding.cure for finding in findings if finding.is_error)
    version = f"pardata {pardata.__version__}, torch {torch.__version__}"
    check(found("versions"), OK, version)


def test_shared_memory_below_a_gibibyte_is_little():
    cure = "workers hand batches over there: start the container with --shm-size=8g"
    check(shared_memory(24 * GIB, GIB), OK, "24.0 GiB")
    check(shared_memory(24 * GIB, GIB - 1), WARNING, "1024 MiB free of 24.0 GiB", cure)
    check(shared_memory(24 * GIB, 64 * MIB), WARNING, "64 MiB free of 24.0 GiB", cure)


def _files():
    found_with = []
    for soft, hard in ((1024, 5000), (1023, 5000), (256, 2000)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        found_with.append(found("open files"))
    return found_with


def test_fewer_than_1024_open_files_are_few():
    ((enough, fewer, few),) = run_caught(_files, world_size=1, fresh=True)
    cure = "ulimit -n $(ulimit -Hn): each tensor"
    check(enough, OK, "at most 1024")
    check(fewer, WARNING, "at most 1023", cure)
    check(few, WARNING, "at most 256", cure)


def _too_old():
    warnings.warn("the driver is too old", stacklevel=1)
    return False


@pytest.fixture
def gpus(monkeypatch):
    """Pretend to have a torch that answers so, GPUs of these names, and so many device files."""

    def pretend(is_available, names=(), files=0):
        told = [SimpleNamespace(name=name, total_memory=141 * GIB) for name in names]
        of_kind = {"get_device_properties": lambda device: told[device.index]}
        monkeypatch.setattr(Path, "glob", lambda *_: range(files))
        there = accelerators(len(names), **of_kind)
        with there, patch.object(torch.accelerator, "is_available", is_available):
            return found("GPUs", here)

    here = world()
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return pretend


def test_gpus_are_counted_and_those_that_torch_does_not_see_are_a_warning(gpus):
    here = "2 x H200, 141 GiB, 1 x H100, 141 GiB; backend cuda:nccl,cpu:gloo"
    check(gpus(lambda: True, ["H200", "H100", "H200"], 3), OK, here)
    check(gpus(lambda: False), OK, "none: training runs on the CPU")
    cure = f"install a torch for CUDA (this one is {torch.__version__}), unset CUDA_VISIBLE_DEVICES"
    check(gpus(lambda: False, files=2), WARNING, "torch sees none of 2 in /dev", cure)
    finding = gpus(_too_old, files=2)
    check(finding, WARNING, "torch sees none of 2 in /dev (the driver is too old)", cure)
    assert "unset CUDA_VISIBLE_DEVICES (it is '')" in finding.cure


def test_an_accelerator_of_one_process_is_shown_with_what_it_says_of_itself(monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 24 * GIB)
    here = world()
    with accelerators(1, kind="mps"):
        check(found("GPUs", here), OK, "1 x mps, 24 GiB; backend gloo")


def test_more_ranks_than_cores_are_a_warning():
    text = "4096 ranks of this host share "
    check(found("cores", replace(world(), size=4096, local_size=4096)), WARNING, text, "start at m")
    alone = found("cores")
    assert alone.status == OK
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert int(alone.text.split()[0]) <= cores


def _threads(number):
    torch.set_num_threads(number)
    return found("threads", replace(world(), local_size=4096))  # which leaves one core to each


def test_more_threads_than_cores_are_a_warning():
    (one,), (two,) = (run_caught(_threads, number, world_size=1) for number in (1, 2))
    check(one, OK, "1 per process (OMP_NUM_THREADS: ")
    check(two, WARNING, "2 per process (OMP_NUM_THREADS: ", "set OMP_NUM_THREADS=1, as each")


def test_an_interface_that_is_not_here_is_an_error(monkeypatch):
    there = [name for _, name in socket.if_nameindex()]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", ",".join(there[:2]))
    check(found("network"), OK, "GLOO_SOCKET_IFNAME=")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{there[0]},no-such-one")
    text = f"GLOO_SOCKET_IFNAME must name an interface of this host, but is '{there[0]},no-such-one"
    check(found("network"), ERROR, text, f"set it to one of {', '.join(there)}, or unset it")


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("localhost", "the host name localhost resolves to "),
        ("127.0.1.1", "the host name 127.0.1.1 resolves to 127.0.1.1"),
        ("no-such-host.invalid", "the host name no-such-host.invalid does not resolve: "),
    ],
)
def test_a_host_name_that_others_cannot_use_matters_from_two_hosts_on(host, problem):
    check(own_address(host), WARNING, problem, "set GLOO_SOCKET_IFNAME to the interface that lead")
    check(own_address("192.0.2.1"), OK, "the host name resolves")
    check(found("network"), OK, "one host")


def test_the_unrelated_pardata_in_the_same_directory_is_an_error(tmp_path):
    assert list(shared_package(tmp_path)) == []
    (tmp_path / "_high_level.py").touch()
    (finding,) = shared_package(tmp_path)
    text = "`torch-pardata` must not share an environment with the distribution `pardata`"
    check(finding, ERROR, text, "remove both with `python -m pip uninstall --yes pardata torch-par")
    assert str(tmp_path) in finding.text


LOST = "[/pair.cc:1] Connection closed by peer: x. This is typically\nframe 0"
TABLE = "every rank must pass the same, but `a` differs"
LATE = "all must come within 1 s, but 1 did not"


@pytest.mark.parametrize(
    ("message", "text", "cure"),
    [
        ("`a` must be 1, but is 2: set a to 1", "`a` must be 1, but is 2: set a to 1", ""),
        ("`a` must be 1, but is 2", "`a` must be 1, but is 2", "the default"),
        (f"{TABLE}:\n  rank 0: 1\nPass 2\n(seen on rank 0)", f"{TABLE}:\n  rank 0: 1\nPass 2", ""),
        (LOST, "Connection closed by peer: x", "the default"),
        (f"{LATE}\n\nrank 1 was here:\nFile x", LATE, "the default"),
        ("", "ValueError", "the default"),
    ],
)
def test_an_error_of_pardatas_has_its_cure_and_any_other_is_its_first_line(message, text, cure):
    found = found_error("n", ValueError(message), "the default")
    assert found == Finding("n", text, cure, is_error=True)


# --- a launcher that nobody knows yet, added as docs/architecture.md says


FLUX = {
    "FLUX_TASK_RANK": "1",
    "FLUX_JOB_SIZE": "3",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "1",
}


def read_flux(env):
    rank, size, local_rank, nodes = (int(env[name]) for name in FLUX)
    return Launch("flux", rank, size, local_rank, size // nodes, None, nodes, "h1", 5)


def test_one_row_of_the_table_is_all_that_a_launcher_needs(monkeypatch):
    is_there = lambda env: "FLUX_TASK_RANK" in env  # noqa: E731  # short
    row = Launcher("flux", "Flux", tuple(FLUX), ("FLUX_",), is_there, read_flux, "FLUX_CORES")
    before = list(LAUNCHERS)
    LAUNCHERS.append(row)
    try:
        for chosen in ({}, {SAYS: "flux"}):
            assert detect(FLUX | chosen) == read_flux(FLUX)
        assert launcher_text(detect(FLUX)) == "Flux"
        with pytest.raises(ValueError, match=r"but Flux set it to 7: the variables \(FLUX_\*\) "):
            detect(FLUX | {"FLUX_TASK_RANK": "7"})
        _, (finding, *ignored) = examine_launcher(FLUX | {"RANK": "1"})
        check(finding, OK, "Flux: 3 processes, to meet at h1:5; from FLUX_TASK_RANK, ")
        assert [one.text for one in ignored] == ["RANK (torchrun)"]
        # No rank of a test inherits them.
        for name, value in {**FLUX, "FLUX_OTHER": "x"}.items():
            monkeypatch.setenv(name, value)
        assert not [name for name in _environment({}) if name.startswith("FLUX")]
        here = replace(world(), launcher="flux", local_size=1)
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
        monkeypatch.setattr("os.cpu_count", lambda: 16)
        monkeypatch.setattr("pardata.ranks._machine.cpu_quota", lambda: None)
        monkeypatch.setenv("FLUX_CORES", "8")
        assert usable_cores(replace(here, local_size=3)) == 4  # bound by Flux
        monkeypatch.setenv("FLUX_CORES", "4")
        assert usable_cores(replace(here, local_size=2)) == 2  # all that the job has, shared
    finally:
        LAUNCHERS[:] = before
