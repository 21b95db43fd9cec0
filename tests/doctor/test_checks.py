"""What `python -m pardata env` says of launchers and of a machine, with limits on both sides."""

import os
import re
import resource
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from launched import slurm_variables, torchrun_variables
from on_ranks import run_caught
from places import ROOT
from pretended import accelerators
from torch.torch_version import TorchVersion

from pardata import __version__
from pardata.doctor._checks import environment, shared_memory
from pardata.environment._launchers import SINGLE, detect_launch

GIB = 2**30
OK, WARNING = False, True  # whether there is a cure


def found(name, env=None, **changes):
    """Return what is said of `name` on this very machine, from among all findings."""
    launch = (SINGLE if env is None else detect_launch(env))._replace(**changes)
    return next(one for one in environment(launch, env or {}) if one.name == name)


def check(finding, status, text, cure=""):
    """Compare a finding with its status, and with how its text and its cure begin."""
    assert finding.text.startswith(text)
    assert finding.cure.startswith(cure)
    assert bool(finding.cure) == status


# --- launchers


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (
            torchrun_variables(1, 3, 5),
            "torchrun: world size 3, to meet at 127.0.0.1:5; from RANK, ",
        ),
        (torchrun_variables(0, 1, 5), "torchrun: world size 1, to meet at "),
        (slurm_variables(1, 2, 5), "slurm: world size 2, to meet at localhost:5; from SLURM_"),
        (
            {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            "none: a single process",
        ),
    ],
)
def test_a_launcher_is_named_with_its_variables(env, text):
    check(found("launcher", env), OK, text)


# --- the machine


def test_shared_memory_below_a_gibibyte_is_little():
    cure = "start the container with --shm-size=8g or --ipc=host"
    check(shared_memory(24 * GIB, GIB), OK, "24.0 GiB")
    check(shared_memory(24 * GIB, GIB - 1), WARNING, "1024 MiB free of 24.0 GiB", cure)


def _files(*limits):
    found_with = []
    for soft in limits:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, 5000))
        found_with.append(found("open files"))
    return found_with


def test_fewer_than_1024_open_files_are_few():
    ((enough, few),) = run_caught(_files, 1024, 1023, world_size=1, fresh=True)
    check(enough, OK, "at most 1024")
    check(few, WARNING, "at most 1023", "ulimit -n $(ulimit -Hn): each tensor")


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
            return found("GPUs")

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return pretend


def test_gpus_are_counted_and_invisible_ones_are_a_warning(gpus):
    here = "2 x H200, 141 GiB, 1 x H100, 141 GiB; backend cuda:nccl,cpu:gloo"
    check(gpus(lambda: True, ["H200", "H100", "H200"], 3), OK, here)
    check(gpus(lambda: False), OK, "none: training runs on the CPU")
    cure = f"install a torch for CUDA (this is {torch.__version__}), unset CUDA_VISIBLE_DEVICES"
    none = "torch sees none of the driver's 2 GPUs"
    check(gpus(lambda: False, files=2), WARNING, none, cure)
    finding = gpus(_too_old, files=2)
    check(finding, WARNING, f"{none} (the driver is too old)", cure)
    assert "unset CUDA_VISIBLE_DEVICES ('')" in finding.cure


def test_mps_is_shown_with_its_memory_and_backend(monkeypatch):
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 24 * GIB)
    with accelerators(1, kind="mps"):
        check(found("GPUs"), OK, "1 x mps, 24 GiB; backend gloo")


def test_a_torch_that_is_newer_than_those_of_ci_is_a_warning(monkeypatch):
    files = [(ROOT / ".ci" / f"{which}.txt").read_text() for which in ("oldest", "newest")]
    oldest, newest = (re.search("^torch[=>]=(.*)$", text, re.MULTILINE)[1] for text in files)
    for torch_here, status in [(f"{newest}.1", OK), ("99.0.0", WARNING)]:
        monkeypatch.setattr(torch, "__version__", TorchVersion(torch_here))
        finding = found("versions")
        check(finding, status, f"pardata {__version__}, torch {torch_here}, Python ")
        assert finding.text.endswith(f"; tested with torch {oldest} and {newest}")
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert f"| torch | {oldest} | {newest} |" in page


def test_more_ranks_than_cores_are_a_warning():
    text = "4096 ranks of this host share "
    check(found("cores", size=4096, local_size=4096), WARNING, text, "start at m")
    alone = found("cores")
    assert not alone.cure
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert int(alone.text.split()[0]) <= cores
