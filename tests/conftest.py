"""What every test finds: a clean environment, and no generator changed for the next."""

import os
import random
import signal
import tempfile
from pathlib import Path

import on_ranks
import pytest
import torch
from hypothesis import HealthCheck, settings

from pardata import __version__
from pardata.ranks._launcher import MPICH, OPEN_MPI, SLURM, TORCHRUN

# The mark of a folder's tests, but for those of the long run. The rooms that depend on the versions
# of torch and Python also run on the oldest ones.
MARKS = {"programs": "programs", "launchers": "launchers", "gpu": "gpu"}
MARKS |= dict.fromkeys(
    ("cache", "checkpoint", "collective", "data", "gradient", "launch", "model", "seeds"), "oldest"
)
HERE = Path(__file__).parent
assert {path.name for path in HERE.iterdir()}.issuperset(MARKS)

# A shell in the background has all that it starts ignore an interrupt. Here it cleans up.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on how fast a machine is, and none leaves files behind.
settings.register_profile(
    "pardata", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pardata")


def pytest_addoption(parser):
    kinds = ["cuda", "cpu"]
    text = "where tests/gpu runs: on a CPU as much of it as makes sense there (default: cuda)"
    parser.addoption("--device", choices=kinds, default=kinds[0], help=text)


def pytest_ignore_collect(collection_path, config):
    """With `-m gpu` leave all other folders alone: what they import an image need not have."""
    is_folder = collection_path.parent == HERE and collection_path.is_dir()
    if config.option.markexpr == "gpu" and is_folder and collection_path.name != "gpu":
        return True
    return None


def pytest_report_header():
    return f"pardata {__version__}, torch {torch.__version__}, {os.cpu_count()} cores"


def pytest_itemcollected(item):
    if HERE in item.path.parents and item.get_closest_marker("soak") is None:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in MARKS:
            item.add_marker(MARKS[folder])


@pytest.fixture
def short_tmp():
    """A folder for TMPDIR with a short name.

    A unix socket's path ends at 107 characters: below a longer TMPDIR a DataLoader's worker cannot
    hand its batch over, and PyTorch waits for it for ever.
    """
    with tempfile.TemporaryDirectory() as directory:
        yield directory


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in (*TORCHRUN, *OPEN_MPI, *MPICH, *SLURM, "PARDATA_LAUNCHER", "PARDATA_JOINED"):
        monkeypatch.delenv(name, raising=False)
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    yield
    random.setstate(python_state)
    torch.set_rng_state(torch_state)


def pytest_sessionfinish():
    on_ranks.end_all()
