"""Processes that save: killed at any moment, ending as they like."""

import signal
import time

import pytest
from common_checkpoint import leftovers, whole_steps

from pardata import Checkpointer


def line_of(output, count, seconds=100):
    """Wait for a line of what a program prints, and return it."""
    deadline = time.monotonic() + seconds
    while len(lines := output.read_text().split("\n")[:-1]) < count:
        assert time.monotonic() < deadline, lines
        time.sleep(0.001)
    return lines[count - 1]


# --- the end of a process


ENDING = """if True:
    import resource, sys, torch
    from pardata import Checkpointer
    checkpointer = Checkpointer(sys.argv[1], asynchronous=True)
    if sys.argv[2] == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    checkpointer.save(4, value=torch.ones(3_000_000))
    if sys.argv[3] == "asked":
        try:
            checkpointer.wait()
        except OSError as error:
            print("caught", error)
    {"exit": lambda: sys.exit(5), "raise": lambda: 1 / 0}.get(sys.argv[3], int)()
"""


@pytest.mark.parametrize(
    ("disk", "how", "status"),
    [("empty", "end", 0), ("empty", "exit", 5), ("empty", "raise", 1),
     ("full", "end", 1), ("full", "exit", 1), ("full", "raise", 1), ("full", "asked", 0)],
)  # fmt: skip
def test_exit_completes_the_last_save_or_reports_its_failure(disk, how, status, programs, tmp_path):
    output, directory = tmp_path / "output", tmp_path / "run"
    ended = programs.start(ENDING, directory, disk, how, output=output)
    assert ended.wait() == status
    told = output.read_text()
    assert ("ZeroDivisionError" in told) == (how == "raise")
    failed = "the checkpoint of step 4 failed: [Errno 27] File too large, while saving step 4"
    assert (failed in told) == (disk == "full" and how != "asked")
    assert told.startswith("caught [Errno 27] File too large, while") == (how == "asked")
    assert (whole_steps(directory), leftovers(directory)) == ([4] if disk == "empty" else [], [])


FORKING = """if True:
    import os, sys, threading
    from pardata import Checkpointer
    from pardata.checkpoint import _checkpointer
    forked, save = threading.Event(), _checkpointer.save
    _checkpointer.save = lambda *args: (forked.wait(), save(*args))[1]
    with Checkpointer(sys.argv[1], asynchronous=True) as checkpointer:
        checkpointer.save(4, value=1)
        child = os.fork()
        if child == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        forked.set()
"""


def test_a_forked_child_does_not_wait_for_a_background_save(programs, tmp_path):
    ended = programs.start(FORKING, tmp_path / "run", output=tmp_path / "output")
    assert ended.wait() == 0, (tmp_path / "output").read_text()
    assert whole_steps(tmp_path / "run") == [4]


# --- killed at any moment


SAVE = """if True:
    import sys, torch
    from pardata import Checkpointer
    value = torch.zeros(200_000)
    checkpointer = Checkpointer(sys.argv[1], keep=2, asynchronous=sys.argv[2] == "asynchronous")
    step = checkpointer.restore().step
    print("saved", step, flush=True)
    while True:
        step += 1
        checkpointer.save(step, value=value.fill_(step))
        checkpointer.wait()
        print("saved", step, flush=True)
"""


def kill_while_it_saves(programs, directory, how, seconds, output):
    """Return the last step that was reported as saved."""
    saving = programs.start(SAVE, directory, how, output=output)
    line_of(output, 2)
    time.sleep(seconds)
    saving.kill()
    assert saving.wait() == -signal.SIGKILL
    return int(output.read_text().split("\n")[-2].split()[1])


def test_a_kill_at_any_moment_leaves_the_last_one_that_was_reported(
    programs, tmp_path, tmp_path_factory
):
    reported = 0
    for number, seconds in enumerate([0.0, 0.011, 0.02]):
        how = ("plain", "asynchronous")[number % 2]
        job = tmp_path, how, seconds, tmp_path_factory.mktemp("output") / "output"
        reported = max(reported, kill_while_it_saves(programs, *job))
        steps = whole_steps(tmp_path)
        assert reported <= max(steps) <= reported + 1
        assert 1 <= len(steps) <= 3
    checkpointer = Checkpointer(tmp_path)
    found = checkpointer.restore()
    assert set(found.values["value"].tolist()) == {found.step}
    checkpointer.save(found.step + 1)
    assert leftovers(tmp_path) == []
