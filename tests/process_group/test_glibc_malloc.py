"""The allocator keeps freed memory: where it can, once, and only when asked."""

import ctypes
import logging
import os
import sys
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from logged import log_of
from on_ranks import run_caught

from pardata import init
from pardata.process_group import _init
from pardata.process_group._init import tune_glibc_malloc

glibc = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"),
    reason="needs glibc",
)


def page_faults(tuned):
    """Count the page faults of taking and freeing 40 MB again and again, in this fresh process."""
    import resource

    if tuned:
        assert tune_glibc_malloc()
    size = 10 * 2**20  # 40 MB: above what glibc learns to keep by itself
    faults = []
    for _ in range(40):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(size)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return faults[10:]  # the heap has its size by then


@glibc
def test_memory_that_is_freed_and_taken_again_costs_no_page_faults():
    ((untuned,), (tuned,)) = (
        run_caught(page_faults, t, world_size=1, fresh=True) for t in (False, True)
    )
    # The heap may grow once more, where a small block has come to lie in the large one that was
    # free. With huge pages the untuned faults are some 20, else 10,000.
    assert sorted(tuned)[-2] < min(untuned) / 2


@pytest.mark.parametrize("platform", ["darwin", "win32", "linux"])
def test_elsewhere_than_under_glibc_nothing_is_done(platform, monkeypatch):
    # Not `ctypes.CDLL` itself, by which torch looks for GPUs the first time that it is asked.
    musl = SimpleNamespace(CDLL=lambda _name: object()) if platform == "linux" else None
    monkeypatch.setattr(_init, "ctypes", musl)
    monkeypatch.setattr(sys, "platform", platform)
    assert tune_glibc_malloc() is False


def init_and_count(arguments, env, works):
    os.environ.update(env)
    with (
        patch("pardata.process_group._init.tune_glibc_malloc", return_value=works) as tune,
        log_of(level=logging.DEBUG) as log,
    ):
        init(**arguments)
        init()
    return tune.call_count, [line for line in log.lines if "allocator" in line]


SAID = "[0/2] the allocator keeps freed memory, unless PARDATA_TUNE_CPU=0"
TUNED = {
    "default": ({}, {}, True, [(1, [SAID]), (1, [])]),
    "elsewhere": ({}, {}, False, [(1, []), (1, [])]),
    "argument": ({"tune_cpu": False}, {}, True, [(0, []), (0, [])]),
    "variable": ({}, {"PARDATA_TUNE_CPU": "0"}, True, [(0, []), (0, [])]),
    "no-cpu": ({"device": "meta"}, {}, True, [(0, []), (0, [])]),
}


@pytest.mark.parametrize(("arguments", "env", "works", "expected"), TUNED.values(), ids=TUNED)
def test_init_tunes_on_a_cpu_unless_told_otherwise_and_says_so_once(
    arguments, env, works, expected
):
    outcomes = run_caught(init_and_count, arguments, env, works, world_size=2)
    assert outcomes == expected
