"""Memory: freed memory is used again by its stream, and the CPU cannot read the device's."""

import gc
import os
import signal
import subprocess
import sys

import pytest
import torch

COUNT = 1000


@pytest.fixture(autouse=True)
def _nothing_queued():
    torch.sim.synchronize()


@pytest.mark.parametrize("is_recorded", [False, True])
def test_freed_memory_is_wrong_for_another_stream_unless_that_was_recorded(is_recorded):
    aside = torch.sim.Stream()
    with torch.sim.stream(aside):
        values = torch.ones(COUNT, device="sim")
    torch.sim.current_stream().wait_stream(aside)
    torch.sim._sleep(10_000_000)
    total = values.sum()
    if is_recorded:
        values.record_stream(torch.sim.current_stream())
    del values
    with torch.sim.stream(aside):
        later = torch.full((COUNT,), 7.0, device="sim")
    assert (total.item() == COUNT) == is_recorded
    assert later.sum().item() == 7 * COUNT


READING = """
import ctypes, torch
x = torch.ones(3, device="sim")
print(x.sum().item(), flush=True)
ctypes.string_at(x.data_ptr(), 1)
"""


def test_the_cpu_cannot_read_it_and_child_processes_find_the_device():
    child = subprocess.run(
        [sys.executable, "-c", READING], capture_output=True, text=True, check=False
    )
    assert (child.stdout, child.returncode) == ("3.0\n", -signal.SIGSEGV), child.stderr


def test_it_counts_what_is_in_use_exactly():
    def used():
        gc.collect()
        torch.sim.synchronize()
        return torch.sim.memory_allocated(), torch.sim.memory_reserved()

    before = used()
    values = torch.ones(128 * COUNT, device="sim")
    held, reserved = used()
    assert held - before[0] == 4 * 128 * COUNT
    del values
    assert used() == (before[0], reserved)
    for _ in range(10):
        torch.ones(128 * COUNT, device="sim") + 1
    once = used()
    for _ in range(10):
        torch.ones(128 * COUNT, device="sim") + 1
    assert used() == once


def test_a_process_that_was_forked_after_the_start_cannot_use_it():
    torch.ones(1, device="sim")
    pid = os.fork()
    if pid == 0:
        try:
            torch.ones(1, device="sim")
        except RuntimeError as error:
            is_told = "forked" in str(error) and torch.sim._is_in_bad_fork()
            os._exit(42 if is_told else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
