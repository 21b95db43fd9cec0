"""Ray Train: workers find the group that Ray made, and run the function of every other launcher."""

import os
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
from namespaces import hosts, require_namespaces
from places import ARTICLES
from processes import run
from programs import MNIST, fingerprint, joined

import pardata


@pytest.fixture(scope="module")
def ray_python():
    """A Python that has Ray, and sees this environment's torch and this pardata.

    ``RAY_PYTHON`` names one that is there, and saves the download (half a gigabyte).
    """
    if given := os.environ.get("RAY_PYTHON"):
        yield given
        return
    with tempfile.TemporaryDirectory() as directory:
        python = Path(directory) / "bin" / "python"
        try:
            run(sys.executable, "-m", "venv", directory)
            run(python, "-m", "pip", "install", "--quiet", "ray[train]", timeout=600)
        except AssertionError as error:
            pytest.skip(f"Ray could not be installed: {str(error)[-300:]}")
        yield str(python)


@pytest.fixture
def alone_on_a_host():
    """A host for Ray's daemons, which leaves nothing of them at the end."""
    require_namespaces()
    with hosts("one") as (host,):
        yield host


def test_two_workers_train_as_one_process_does(ray_python, alone_on_a_host, alone, folder):
    seen = [str(Path(pardata.__file__).parents[1]), sysconfig.get_path("purelib")]
    printed = run(
        *alone_on_a_host.command(
            ray_python, ARTICLES / "ray_train.py", "--workers", 2, *MNIST[1:],
            "--run-dir", folder / "run",
        ),
        # No reports, no token in the home directory, and each line as it is printed.
        RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", RAY_DEDUP_LOGS="0",
        RAY_TMPDIR=str(folder), PYTHONPATH=os.pathsep.join(seen),
        RAY_worker_niceness="0",  # with its own, 15, workers hardly run beside other tests
        timeout=600,  # it starts some ten processes
    )  # fmt: skip
    assert joined(printed) == "world size 2, nodes 1, launcher existing"
    assert fingerprint(printed) == alone
