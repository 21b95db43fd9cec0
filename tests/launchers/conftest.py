"""What the launchers' tests share: a folder, and the run that all of them repeat."""

import sys
import tempfile
from pathlib import Path

import pytest
from processes import run
from programs import MNIST, fingerprint


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """A folder for everything that a test leaves; its name is short, for unix sockets."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setenv("PYTHONUNBUFFERED", "1")
        yield Path(directory)


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """The fingerprint of `mnist.py` in one process that nobody launched."""
    return fingerprint(run(sys.executable, *MNIST, "--run-dir", tmp_path_factory.mktemp("alone")))
