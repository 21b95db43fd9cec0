"""Programs as a user starts them, and what is left of them when they are in trouble: nothing."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
WHO = Path(__file__).parent / "who.py"

# Short: five steps. The same to the last bit on any number of processes.
MNIST = [
    EXAMPLES / "mnist.py",
    "--data", "digits", "--epochs", 1, "--strategy", "exact", "--batch-size", 256,
]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def run(*command, timeout=300, **env):
    """Run a program to its end, which must be a good one; return all that it printed."""
    job = start(*command, stdout=subprocess.PIPE, **env)
    with ended(job):
        try:
            printed, _ = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            printed = (late.stdout or b"").decode(errors="replace")
            msg = f"{command} took longer than {timeout} s; it printed:\n{printed}"
            raise AssertionError(msg) from None
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
        if job.poll() is None:
            for pid in [*descendants(job.pid), job.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        job.wait()
        if job.stdout:
            job.stdout.close()


def descendants(pid):
    """Return the processes that `pid` started, and those that they did."""
    file = Path(f"/proc/{pid}/task/{pid}/children")
    children = [int(child) for child in file.read_text().split()] if file.exists() else []
    return [*children, *(other for child in children for other in descendants(child))]


def wait_for(condition, seconds=240, what=lambda: ""):
    """Return what `condition` gives as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not so within {seconds} s: {what()}"
        time.sleep(0.2)
    return found


def fingerprint(printed):
    """Return the fingerprint that `mnist.py` prints at its end."""
    found = re.findall(r"fingerprint of the weights (\w+)", printed)
    assert len(found) == 1, printed
    return found[0]


def joined(printed):
    """Return what `mnist.py` says that it joined, as ``"2 processes on 1 node, launched by …"``."""
    found = re.search(r"\[0/\d+\] (\d+ process(?:es)? on .*?), backend", printed)
    assert found, printed
    return found[1]
