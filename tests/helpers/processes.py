"""Programs as a user starts them, and what is left of them when they are in trouble: nothing."""

import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path


def without_gloo(text):
    """Return `text` without the lines that gloo of torch before 2.12 prints where groups begin."""
    return re.sub(r"\[Gloo\] Rank .*\n|\d+ is connected to \d+ peer ranks\..*\n", "", text)


def run(*command, timeout=300, **env):
    """Run a program to its end, which must be a good one; return all that it printed."""
    job = start(*command, stdout=subprocess.PIPE, **env)
    with ended(job):
        try:
            printed, _ = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            printed = (late.stdout or b"").decode(errors="replace")
            raise AssertionError(
                f"{command} took longer than {timeout} s; it printed:\n{printed}"
            ) from None
    assert job.returncode == 0, f"{command} ended with {job.returncode}; it printed:\n{printed}"
    return printed


def start(*command, stdout, **env):
    """Start a program."""
    return subprocess.Popen(
        list(map(str, command)),
        stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **env},
    )  # fmt: skip


@contextmanager
def ended(job):
    """Kill a program that still runs at the end, with all that it started."""
    try:
        yield job
    finally:
        kill(job)
        if job.stdout:
            job.stdout.close()


def kill(job):
    """Kill a program and all that it started, as when their machine goes."""
    if job.poll() is None:
        for pid in [*descendants(job.pid), job.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    job.wait()


def descendants(pid):
    """Return the processes that `pid` started, and those that they did."""
    own = children(pid)
    return [*own, *(other for child in own for other in descendants(child))]


def children(pid):
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:  # it has ended, or this is no Linux
        return []
    return [int(child) for child in text.split()]


def wait_for(condition, seconds=240, what=lambda: "", often=0.2):
    """Return what `condition` gives as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not so within {seconds} s: {what()}"
        time.sleep(often)
    return found
