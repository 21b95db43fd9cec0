"""What every test finds: a clean environment, and no generator changed for the next."""

import gc
import os
import random
import signal
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import forked
import on_ranks
import pytest
import torch
from hypothesis import HealthCheck, settings
from private_names import ROWS

from pardata import __version__
from pardata.environment._launchers import MPICH, OPEN_MPI, SLURM, TORCHRUN

# The mark of a folder's tests, but for those of the long run. The packages that depend on the
# versions of torch and Python also run on the oldest ones.
MARKS = {"programs": "programs", "launchers": "launchers", "gpu": "gpu"}
MARKS |= dict.fromkeys(
    ("cache", "checkpoint", "data", "model", "process_group", "rng", "store", "strategies"),
    "oldest",
)
# What most tests of a mark import, for a second or two: their processes are forked with it.
IMPORTED = {"programs": ("torchvision", "sklearn.datasets")}
# Files of these packages that call nothing of PyTorch that changes: not on the oldest versions.
OF_ANY_VERSION = {
    *("test_same_batches.py", "test_plan.py", "test_loader_state.py", "test_sample_count.py"),
    *("test_shuffle.py", "test_batch.py", "test_changing_data.py", "test_held_objects.py"),
    *("test_cache_dataset.py", "test_ragged_samples.py", "test_wait_timer.py"),
    *("test_watchdog.py", "test_loss_weights.py"),
}
# Files of few tests that take long, the longest first.
LONGEST = (
    *("test_kills.py", "test_soak.py", "test_one_rank.py", "test_every_world_size.py"),
    *("test_command.py", "test_child_processes.py", "test_exact_matrix.py", "test_exact_step.py"),
    *("test_init.py", "test_uncaught_exceptions.py", "test_run.py", "test_slow_disk.py"),
    *("test_hang.py", "test_comm_errors.py", "test_shutdown.py", "test_watchdog.py"),
    *("test_workers.py", "test_same_batches.py", "test_interpreter_end.py", "test_public_api.py"),
    *("test_elastic.py", "test_killed_ranks.py", "test_examples.py", "test_benchmarks.py"),
)
HERE = Path(__file__).parent
assert {path.name for path in HERE.iterdir()}.issuperset(MARKS)
assert {path.name for path in HERE.glob("*/test_*.py")} >= OF_ANY_VERSION

# A shell in the background has all that it starts ignore an interrupt. Here it cleans up.
signal.signal(signal.SIGINT, signal.default_int_handler)

# As ranks do. Threads of several workers of pytest-xdist would wait for each other on few cores.
torch.set_num_threads(1)

# No test depends on how fast a machine is, and none leaves files behind.
settings.register_profile(
    "pardata", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pardata")


def pytest_addoption(parser):
    kinds = ["cuda", "cpu", "sim"]
    text = (
        "where tests/gpu runs (default: cuda): on a CPU as much of it as makes sense there, "
        "on a simulated accelerator all that does not need CUDA itself"
    )
    parser.addoption("--device", choices=kinds, default=kinds[0], help=text)


def pytest_configure(config):
    # pytest-xdist would hand out the files of fewest tests last, however long these take.
    config.option.loadscopereorder = False
    wanted = IMPORTED.get(config.option.markexpr, ())
    forked.preloaded += [name for name in wanted if find_spec(name.partition(".")[0])]
    if hasattr(config, "workerinput"):
        forked.use_folder(config.workerinput["programs"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tell a worker of pytest-xdist where it starts programs."""
    node.workerinput["programs"] = str(forked.the_programs().folder)


def pytest_ignore_collect(collection_path, config):
    """Leave alone the folders of which `-m` takes nothing: what they import may not be there."""
    if collection_path.parent != HERE or not collection_path.is_dir():
        return None
    mark, chosen = MARKS.get(collection_path.name), config.option.markexpr
    is_of_another = chosen in MARKS.values() and chosen != mark
    return True if is_of_another or f"not {mark}" in chosen.split(" and ") else None


def pytest_collection_modifyitems(items):
    """Put first what takes longest: else a worker of pytest-xdist is alone with it at the end."""
    tests = Counter(item.path for item in items)
    place = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (place.get(item.path.name, len(place)), -tests[item.path]))


def pytest_collection_finish():
    """Freeze what the tests have imported: each garbage collection would walk it, for 0.1 s."""
    gc.collect()
    gc.freeze()


def pytest_report_header():
    return f"pardata {__version__}, torch {torch.__version__}, {os.cpu_count()} cores"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Name the private names of torch that a red test shows."""
    report, test = (yield), item.nodeid.partition("[")[0]
    if report.failed and (names := ", ".join(str(row) for row in ROWS if test in row.tests)):
        report.sections.append(("Private names of torch", f"may have changed: {names}"))
    return report


def pytest_itemcollected(item):
    if HERE in item.path.parents and item.get_closest_marker("soak") is None:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in MARKS and item.path.name not in OF_ANY_VERSION and not _is_of_many_ranks(item):
            item.add_marker(MARKS[folder])


def _is_of_many_ranks(item):
    """Return whether a test of a package runs on 3 ranks or more: versions show themselves on 2."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    is_of_package = MARKS.get(item.path.relative_to(HERE).parts[0]) == "oldest"
    return is_of_package and isinstance(size := parameters.get("size"), int) and size > 2


@pytest.fixture
def short_tmp():
    """A folder for TMPDIR with a short name.

    A unix socket's path ends at 107 characters: below a longer TMPDIR a DataLoader's worker cannot
    hand its batch over, and PyTorch waits for it for ever.
    """
    with tempfile.TemporaryDirectory() as directory:
        yield directory


@pytest.fixture(scope="session")
def programs():
    """What starts programs, without the time that importing torch takes."""
    return forked.the_programs()


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in (*TORCHRUN, *OPEN_MPI, *MPICH, *SLURM, "PARDATA_LAUNCHER", "PARDATA_JOINED"):
        monkeypatch.delenv(name, raising=False)
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    yield
    random.setstate(python_state)
    torch.set_rng_state(torch_state)
    on_ranks.forget_compiled()


def pytest_sessionfinish():
    forked.end_all()
    on_ranks.end_all()
