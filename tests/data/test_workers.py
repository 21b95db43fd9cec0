"""How many workers a rank gets, whether they can send, and when they end."""

import gc
import io
import itertools
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from multiprocessing.connection import arbitrary_address
from pathlib import Path

import pytest
import torch
from forked import the_programs
from on_ranks import run, run_caught
from processes import descendants, wait_for, without_gloo
from torch.utils.data import Dataset, TensorDataset

from pardata import Checkpointer, make_loader, world
from pardata.data._step_source import resolve_num_workers
from pardata.environment._world import cpus_per_rank

STOPPING, HANGING, ENDING = (
    Path(__file__).parents[1] / "helpers" / name
    for name in ("stopping.py", "hanging.py", "ending.py")
)
STARTS = ("fork", "forkserver", "spawn")

AUTO = [
    (4, range(4), 3),
    (9, range(4), 8),
    (100, range(4), 8),
    (1, range(4), 0),
    (4, TensorDataset(torch.ones(4)), 0),
]


@pytest.mark.parametrize(("cores", "dataset", "workers"), AUTO)
def test_auto_is_the_cores_less_one_and_none_for_whole_batches(
    monkeypatch, cores, dataset, workers
):
    # Asked below make_loader, as DataLoader warns of more workers than there are cores.
    monkeypatch.setattr("pardata.data._step_source.cpus_per_rank", lambda here: cores)
    assert resolve_num_workers("auto", dataset, world()) == workers


def _auto_workers():
    options = make_loader(range(4), 2)._source._options
    return options["num_workers"], cpus_per_rank(world().local_size)


def test_ranks_of_one_node_share_its_cores():
    for workers, cores in run(_auto_workers, world_size=2):
        assert workers == min(8, cores - 1)
        assert cores <= max(1, len(os.sched_getaffinity(0)) // 2)


def _load_below(directory):
    # As if TMPDIR had been `directory` since the process began: multiprocessing asks only once.
    multiprocessing.current_process()._config["tempdir"] = directory
    return [batch.tolist() for batch in make_loader(range(4), 4, num_workers=1)]


def _directory_whose_sockets_have(length, below):
    room = len(arbitrary_address("AF_UNIX")) - len(multiprocessing.util.get_temp_dir())
    directory = below + "/" + "x" * (length - room - len(below) - 1)
    Path(directory).mkdir()
    return directory


@pytest.mark.skipif(
    torch.multiprocessing.get_sharing_strategy() != "file_descriptor", reason="opens no socket"
)
def test_workers_accept_the_longest_socket_path_and_no_longer_one(short_tmp):
    longest = _directory_whose_sockets_have(107, short_tmp)
    assert run(_load_below, longest, world_size=2) == [[[0, 1]], [[2, 3]]]
    longer = _directory_whose_sockets_have(108, short_tmp)
    for outcome in run_caught(_load_below, longer, world_size=2):
        assert str(outcome).startswith("ValueError: TMPDIR must have at most 89 characters, but is")


def _reads_from(make, starts):
    class Holder(Dataset):
        def __init__(self):
            self.held = make()

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return index

    return make_loader(Holder(), 2, num_workers=1, multiprocessing_context=starts)


class Named:
    """Logs to a file and to the screen, as datasets do."""

    def __init__(self, path):
        self.log = logging.getLogger("of a dataset")
        self.log.handlers = [logging.FileHandler(path), logging.StreamHandler()]


def test_forked_workers_share_no_file_that_is_open_for_reading(tmp_path):
    path = tmp_path / "data"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    closed = path.open("rb")
    closed.close()
    with path.open("rb") as file, zipfile.ZipFile(path) as archive:
        found = {"held": file, "held[0]": [archive], "held['f'][0]": {"f": [file]}}
        for where, held in found.items():
            with pytest.raises(ValueError, match=re.escape(f"`dataset.{where}` must be closed")):
                _reads_from(lambda held=held: held, "fork")
        _reads_from(lambda: file, "spawn")  # where the dataset is pickled, which refuses files
    for held in (closed, io.BytesIO(b"data"), Named(tmp_path / "log"), sys.stderr):
        _reads_from(lambda held=held: held, "fork")


# --- what becomes of them when signals come, and when their rank ends


@contextmanager
def started(tmp_path, *command):
    """Start a program in a session of its own; yield it, and what reads all that it printed."""
    file = tmp_path / "printed"
    job = the_programs().start(*command, output=file)
    try:
        yield job, lambda: without_gloo(file.read_text())
    finally:
        job.kill()


def wait_until_printed(text, job, printed):
    wait_for(lambda: text in printed() or job.poll() is not None, 100, printed)
    assert text in printed(), printed()


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


SOAK = pytest.mark.soak
PLAIN = [("fork", "SIGTERM", 1)]
STOPPED = [
    pytest.param(*case, marks=() if case in PLAIN else SOAK)
    for case in itertools.product(STARTS, ("SIGTERM", "SIGUSR2"), (0, 1))
]


@pytest.mark.parametrize(("starts", "name", "persistent"), STOPPED)
def test_a_signal_to_all_processes_stops_a_run_that_has_workers(starts, name, persistent, tmp_path):
    arguments = [starts, persistent, tmp_path / "run"]
    with started(tmp_path, STOPPING, *arguments) as (job, printed):
        wait_until_printed("reads", job, printed)
        os.killpg(job.pid, getattr(signal, name))
        assert job.wait(100) == 0, printed()
    *_, stopped, last = printed().splitlines()
    assert last == "ended well"
    step = int(stopped.removeprefix("stopped after "))
    assert Checkpointer(tmp_path / "run").steps()[-1] == step


@pytest.mark.parametrize("starts", ["fork", "forkserver", pytest.param("spawn", marks=SOAK)])
def test_so_does_one_while_workers_start(starts, tmp_path):
    with started(tmp_path, STOPPING, starts, 1, tmp_path / "run", "begins") as (job, printed):
        assert job.wait(100) == 0, printed()
    assert printed() == "begins\nstopped after 1\nended well\n"


@pytest.mark.parametrize("starts", ["fork", pytest.param("spawn", marks=SOAK)])
def test_so_does_one_while_workers_end(starts, tmp_path):
    # Where they are forked no interpreter ends in them, and a spawned one must not either.
    with started(tmp_path, STOPPING, starts, 0, tmp_path / "run", "ends") as (job, printed):
        assert job.wait(100) == 0, printed()
    # The log's advice to take more workers may come between; an epoch has 10 steps.
    assert re.fullmatch(
        r"begins\nreads\n(the epoch waited.*\n)?stopped after \d*1\nended well\n", printed()
    )


@pytest.mark.parametrize("starts", [pytest.param("fork", marks=SOAK), "forkserver"])
def test_a_worker_that_hangs_ends_when_its_rank_is_killed(starts, tmp_path):
    with started(tmp_path, HANGING, starts, "waits") as (job, printed):
        wait_until_printed("hangs", job, printed)
        own = descendants(job.pid)
        assert own
        os.kill(job.pid, signal.SIGKILL)  # it alone
        wait_for(lambda: not any(map(lives, own)), 60)


HUNG = [
    pytest.param(*case, marks=() if case in (("fork", "breaks"), ("spawn", "raises")) else SOAK)
    for case in itertools.product(STARTS, ("ends", "raises", "breaks", "breaks in a thread"))
]


@pytest.mark.parametrize(("starts", "how"), HUNG)
def test_a_hung_worker_ends_silently_with_its_loop(starts, how, tmp_path):
    with started(tmp_path, HANGING, starts, how) as (job, printed):
        assert job.wait(60) == (how == "raises"), printed()
    first, *others = printed().splitlines()
    assert first == "hangs"
    last = {"ends": None, "raises": "RuntimeError: the end"}.get(how, "0 workers")
    assert others[-1:] == [last] * (last is not None)
    assert len(others) < 2 or others[0].startswith("Traceback")


@pytest.mark.parametrize(
    ("how", "workers", "starts"),
    [
        ("end", 0, "fork"),
        ("exit", 1, "fork"),
        ("error", 1, "fork"),
        pytest.param("error", 1, "spawn", marks=SOAK),
    ],
)
def test_a_program_that_ends_in_the_middle_of_epochs_says_nothing(how, workers, starts, tmp_path):
    with started(tmp_path, ENDING, how, workers, starts) as (job, printed):
        assert job.wait(60) == (how == "error"), printed()
    last = "RuntimeError: the end\n" if how == "error" else ""
    assert printed().count("Traceback") == bool(last)
    assert printed().endswith(last) if last else printed() == ""


class _Ends(Dataset):
    """Its worker starts a program, and ends it."""

    def __len__(self):
        return 1

    def __getitem__(self, _):
        program = subprocess.Popen(["sleep", "1000"])
        program.terminate()
        return program.wait(60)


def _own_of_fork_server():
    context = multiprocessing.get_context("forkserver")
    (found,) = make_loader(_Ends(), 1, num_workers=1, multiprocessing_context=context)
    own = context.Process(target=time.sleep, args=(1000,))
    own.start()
    own.terminate()
    own.join(60)
    return found.item(), own.exitcode


def test_other_processes_are_ended_by_sigterm_as_ever():
    assert run(_own_of_fork_server, world_size=1, fresh=True) == [(-15, -15)]


def error_that_holds_a_loader():
    """Return an error of an epoch with a worker: its traceback leads to the loader, as a cycle."""
    options = {"num_workers": 1, "persistent_workers": True}
    loader = make_loader(range(8), 2, batch_transform=len, **options)
    kept = None
    for _ in loader:
        try:
            raise ValueError
        except ValueError as error:
            kept = error  # the frame holds the error, and the error holds the frame
            break
    return loader.batch_size, kept is not None


def test_workers_end_with_a_loader_that_the_garbage_collector_finds():
    before = {*multiprocessing.active_children()}
    assert error_that_holds_a_loader() == (2, True)
    left = {*multiprocessing.active_children()} - before
    gc.collect()
    assert [worker.exitcode for worker in left] == [0]
