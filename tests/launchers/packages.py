"""Programs of the distribution that a test needs, installed where that is possible."""

import fcntl
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

# Wait for another apt-get rather than fail.
_INSTALL = [
    "apt-get", "install", "-y", "-qq", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=120",
]  # fmt: skip
_POLICY = Path("/usr/sbin/policy-rc.d")


def require(programs, packages):
    """Install `packages` where one of `programs` is missing; skip the test where that fails."""
    if missing := _missing(programs):
        if shutil.which("apt-get") is None or os.geteuid() != 0:
            pytest.skip(f"{', '.join(missing)} missing, and only root can apt-get install them")
        with _no_service_started():
            failed = _apt(_INSTALL, packages) and (
                _apt(["apt-get", "update", "-qq"], []) or _apt(_INSTALL, packages)
            )
        if failed:
            pytest.skip(f"{' '.join(packages)} could not be installed: {failed}")
        if missing := _missing(programs):
            there = f"{' '.join(packages)} was installed"
            pytest.skip(f"{', '.join(missing)} not in PATH ({os.environ['PATH']}), but {there}")


def _missing(programs):
    return [program for program in programs if shutil.which(program) is None]


def _apt(command, packages):
    """Return why it failed, or None."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        [*command, *packages], env=env, capture_output=True, text=True, check=False, timeout=300
    )
    return (
        (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done.returncode else None
    )


@contextmanager
def _no_service_started():
    """Keep the packages from starting daemons: the tests start their own. One process at a time."""
    turn = os.open(_POLICY.parent, os.O_RDONLY)
    fcntl.flock(turn, fcntl.LOCK_EX)
    ours = not _POLICY.exists()
    if ours:
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            _POLICY.unlink()
        os.close(turn)
