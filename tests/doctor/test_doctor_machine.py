"""What the doctor says of a machine: limits on both of their sides, and the cure."""

import multiprocessing
import os
import shutil
import socket
from dataclasses import replace

import pytest
import torch
from on_ranks import Raised, run_caught

import pardata
from pardata import world
from pardata.doctor._finding import ERROR, OK, WARNING
from pardata.doctor._machine import (
    examine_machine,
    hidden_gpus,
    open_files,
    own_address,
    shared_memory,
)
from pardata.doctor._versions import examine_versions

MIB, GIB = 2**20, 2**30


def found(name, here=None):
    """Return what is said of `name` on this very machine, from among all findings."""
    everything = [*examine_machine(here or world()), *examine_versions()]
    return next(finding for finding in everything if finding.name == name)


def test_each_thing_is_named_once_and_every_complaint_has_a_cure():
    findings = [*examine_machine(world()), *examine_versions()]
    names = [finding.name for finding in findings]
    assert len(set(names)) == len(names)
    assert {"GPUs", "cores", "threads", "versions", "backends"} <= set(names)
    assert all(finding.cure for finding in findings if finding.status != OK)


@pytest.mark.parametrize(
    ("total", "free", "status", "text"),
    [
        (24 * GIB, GIB, OK, "24.0 GiB"),
        (24 * GIB, GIB - 1, WARNING, "1024 MiB free of 24.0 GiB"),
        (64 * MIB, 64 * MIB, WARNING, "64 MiB free of 64 MiB"),
    ],
)
def test_shared_memory_below_a_gibibyte_is_little(total, free, status, text):
    finding = shared_memory(total, free)
    assert (finding.status, finding.text) == (status, text)
    assert ("--shm-size=8g" in finding.cure) == (status != OK)


@pytest.mark.skipif(not os.path.exists("/dev/shm"), reason="no /dev/shm here")  # noqa: PTH110
def test_the_shared_memory_is_that_of_this_machine():
    usage = shutil.disk_usage("/dev/shm")
    expected = shared_memory(usage.total, usage.free)
    assert (found("/dev/shm").status, "GiB" in expected.text) == (expected.status, True)


@pytest.mark.parametrize(
    ("soft", "hard", "status", "text", "cure"),
    [
        (1024, 4096, OK, "at most 1024", ""),
        (None, None, OK, "no limit", ""),
        (1023, None, WARNING, "at most 1023 (ulimit -Hn: no limit)", "ulimit -n 4096: each tensor"),
        (256, 2000, WARNING, "at most 256 (ulimit -Hn: 2000)", "ulimit -n 2000: each tensor"),
    ],
)
def test_fewer_than_1024_open_files_are_few(soft, hard, status, text, cure):
    finding = open_files(soft, hard)
    assert (finding.status, finding.text) == (status, text)
    assert finding.cure.startswith(cure)
    assert bool(finding.cure) == bool(cure)


def test_no_gpu_is_no_complaint_where_there_is_none():
    finding = hidden_gpus(0, "")
    assert (finding.status, finding.text) == (OK, "none, so that the CPU computes")


@pytest.mark.parametrize(
    ("toolkit", "visible", "cure"),
    [
        (None, None, "install a torch that is built for CUDA"),
        ("13.2", "", "unset CUDA_VISIBLE_DEVICES, which is ''"),
        ("13.2", None, "see with nvidia-smi whether the driver is new enough for CUDA 13.2"),
    ],
)
def test_gpus_that_torch_does_not_see_are_a_warning(monkeypatch, toolkit, visible, cure):
    monkeypatch.setattr(torch.version, "cuda", toolkit)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    finding = hidden_gpus(2, "the driver is too old")
    assert finding.status == WARNING
    assert finding.text == "torch sees none of 2 in /dev (the driver is too old)"
    assert finding.cure.startswith(cure)


def test_more_ranks_than_cores_are_a_warning():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    crowd = replace(world(), size=4096, local_size=4096)
    finding = found("cores", crowd)
    assert finding.status == WARNING
    assert finding.text.startswith("4096 ranks of this host share ")
    assert finding.cure.startswith("start at most ")
    alone = found("cores")
    assert alone.status == OK
    assert int(alone.text.split(",")[0]) <= cores


def _threads(number):
    torch.set_num_threads(number)
    return found("threads", replace(world(), local_size=4096))  # which leaves one core to each


def test_more_threads_than_cores_are_a_warning():
    (one,), (two,) = run_caught(_threads, 1, world_size=1), run_caught(_threads, 2, world_size=1)
    assert one.status == OK
    assert one.text.startswith("1 (OMP_NUM_THREADS")
    assert two.status == WARNING
    assert two.text.startswith("2 on the 1 core of each rank (OMP_NUM_THREADS")
    assert two.cure == "set OMP_NUM_THREADS=1"


def test_an_interface_that_is_not_here_is_an_error(monkeypatch):
    there = [name for _, name in socket.if_nameindex()]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", ",".join(there[:2]))
    assert found("network").status == OK
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{there[0]},no-such-one")
    finding = found("network")
    assert finding.status == ERROR
    assert "must name an interface of this host, but is '" in finding.text
    assert finding.cure == f"set it to one of {', '.join(there)}, or unset it"


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("localhost", "the host's name, localhost, is "),
        ("127.0.1.1", "and leads nowhere else"),
        ("no-such-host.invalid", "the host's name, no-such-host.invalid, does not resolve ("),
    ],
)
def test_a_host_name_that_others_cannot_use_matters_from_two_hosts_on(host, problem):
    for alone, status in ((True, OK), (False, WARNING)):
        finding = own_address(host, alone=alone)
        assert finding.status == status
        assert problem in finding.text
        assert ("GLOO_SOCKET_IFNAME" in finding.cure) != alone


def test_an_address_that_others_reach_is_all_right():
    assert own_address("192.0.2.1", alone=False).status == OK


def _sockets_below(directory):
    multiprocessing.current_process()._config["tempdir"] = directory
    return found("sockets")


@pytest.mark.skipif(
    torch.multiprocessing.get_sharing_strategy() != "file_descriptor", reason="opens no socket"
)
def test_a_temporary_directory_with_too_long_a_name_is_an_error(tmp_path):
    (finding,) = run_caught(_sockets_below, str(tmp_path / ("x" * 120)), world_size=1)
    assert not isinstance(finding, Raised)
    assert finding.status == ERROR
    assert "the temporary directory must have a name of at most" in finding.text
    assert finding.cure == "set TMPDIR to one with a shorter name, or pass num_workers=0"


def test_the_versions_are_those_installed():
    text = found("versions").text
    assert text.startswith(f"pardata {pardata.__version__}, torch {torch.__version__}")
