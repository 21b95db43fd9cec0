"""Runs that are killed and go on at another size end with the weights of an undisturbed one."""

import json
import os
import random
import re
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked import python
from launched import reserved_port
from places import ARTICLES, EXAMPLES
from processes import children, ended, run, start, wait_for

ELASTIC = EXAMPLES / "elastic.py"

needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds its workers in /proc")


def program(*arguments):
    """Run Python to its end; return what it printed."""
    return run(python(), *arguments)


@contextmanager
def started(log, *arguments):
    """Start Python, printing to `log`; nothing of it is left at the end."""
    with (
        log.open("w") as file,
        ended(start(sys.executable, *arguments, stdout=file, PYTHON_EXEC=str(python()))) as job,
    ):
        yield job


def torchrun(log, *arguments):
    """Start torchrun in the same way."""
    return started(log, "-m", "torch.distributed.run", *arguments)


def until(text, *logs):
    """Wait until `text` has been printed to one of these."""
    told = lambda: [log.read_text() for log in logs]  # noqa: E731  # a short one
    wait_for(lambda: any(text in each for each in told()), 120, told, often=0.01)


def fingerprint(printed):
    return re.search(r"fingerprint ([0-9a-f]{64})", printed)[1]


def story(sizes):
    """Tell the example's story: an undisturbed run, and one that is killed on its way."""
    # A checkpoint at every step: the first may be killed in its step 3, and the next must resume.
    return program(ELASTIC, "--sizes", *sizes, "--epochs", 2, "--save-every", 1)


@pytest.fixture(scope="module")
def told():
    return story((2, 1))


@pytest.fixture(scope="module")
def undisturbed(told):
    """The fingerprint of a run in one process that is left alone: the story begins with it."""
    return fingerprint(told)


def test_mnist_compares_a_run_in_one_process_with_one_in_several():
    printed = program(
        ARTICLES / "mnist.py", "--data", "digits", "--epochs", 1, "--exact-check", 2,
        "--batch-size", 256, "--microbatch-size", 64,
    )  # fmt: skip
    assert "1 and 2 processes are bitwise identical" in printed
    assert len(set(re.findall(r"fingerprint of the weights (\w+)", printed))) == 1


def test_the_old_launcher_gives_each_rank_its_place(tmp_path):
    # It hands the script an argument too, --local-rank.
    with reserved_port() as port:
        printed = program(
            *("-m", "torch.distributed.launch", "--nproc-per-node=2", f"--master-port={port}"),
            *(ARTICLES / "mnist.py", "--data", "digits", "--epochs", 1, "--run-dir", tmp_path),
        )
    assert "joined: world size 2, nodes 1, launcher torchrun" in printed
    assert "total training time" in printed


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((2, 1, 3), marks=pytest.mark.soak)])
def test_a_killed_run_resumes_at_another_size_to_the_same_bits(sizes, told):
    printed = told if sizes == (2, 1) else story(sizes)
    assert printed.count(" of this start") == len(sizes) - 1
    assert re.search(rf"resumes after step \d+ on world size {sizes[-1]}\n", printed)
    assert f"bitwise identical on 1 and on {', '.join(map(str, sizes))}" in printed


def test_torchrun_may_restart_the_workers(undisturbed, tmp_path):
    log, moment = tmp_path / "log.txt", random.randint(6, 20)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", ELASTIC, "--epochs", 2]
    with torchrun(log, *options, "--run-dir", tmp_path, "--die-at", moment) as job:
        assert job.wait(timeout=120) == 0
    printed = log.read_text()
    assert re.search(r"resumes after step \d+ on world size 2\n", printed)
    assert fingerprint(printed) == undisturbed


@needs_proc
@pytest.mark.parametrize("epochs", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_stopped_run_saves_and_resumes_at_the_next_step(epochs, tmp_path):
    # On any rank, and the launcher's own signal is one too.
    run_dir = tmp_path / "run"
    options = [
        ARTICLES / "mnist.py", "--data", "digits", "--epochs", epochs, "--strategy", "exact",
        "--microbatch-size", 16, "--log-interval", 1, "--run-dir",
    ]  # fmt: skip
    expected = program(*options, tmp_path / "undisturbed").split()[-1]
    log = tmp_path / "log.txt"
    with torchrun(log, "--standalone", "--nproc-per-node=2", *options, run_dir) as job:
        until("step 5 ", log)
        os.kill(random.choice(children(job.pid)), signal.SIGUSR2)
        assert job.wait(timeout=120) == 0
    assert re.search(r"stopped; --run-dir .* resumes after step \d+", log.read_text())
    log = tmp_path / "again.txt"
    with started(log, *options, run_dir, "--requeue", 75) as alone:
        until(f"epoch {epochs}/{epochs}", log)  # it can be asked from here on
        alone.send_signal(signal.SIGTERM)
        assert alone.wait(timeout=120) == 75
    assert "got SIGTERM: the run stops at this step" in log.read_text()
    assert program(*options, run_dir).split()[-1] == expected
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["step"] for line in lines if "train/loss" in line]
    assert losses == list(range(1, 22 * epochs + 1))  # no step lost, and none done again
