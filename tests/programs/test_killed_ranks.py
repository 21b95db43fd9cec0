"""examples/warm.py and examples/survive.py: a rank is killed, and the weights are those without.

A program that is read to its end has left no process: each would hold its output open.
"""

import re
import sys
from functools import cache
from pathlib import Path

import pytest
from forked import python
from places import EXAMPLES
from processes import run

WARM, SURVIVE = EXAMPLES / "warm.py", EXAMPLES / "survive.py"

needs_memory = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="has no /dev/shm")


def fingerprints(printed):
    return re.findall(r"fingerprint ([0-9a-f]{64})", printed)


@cache
def undisturbed(example):
    """Return the fingerprint of a run in one process, which nobody kills."""
    printed = run(python(), example, "--size", 1)
    assert not re.search(r"rank \d died|p\d was killed", printed)
    (found,) = fingerprints(printed)
    return found


@needs_memory
@pytest.mark.parametrize("victim", [0, 1])  # rank 0 serves the store
def test_warm_starts_all_ranks_again(victim):
    printed = run(python(), WARM, "--kill", f"{victim}@23")
    assert re.findall(r"rank \d died with status -?\d+", printed) == [
        f"rank {victim} died with status -9"
    ]
    assert re.search(r"resumed after step 20: step 21, \d+\.\d\d s after a death", printed)
    assert fingerprints(printed) == [undisturbed(WARM)]
    folder = re.search("checkpoints in (/dev/shm/warm-.*)", printed)[1]
    assert not Path(folder).exists()


@needs_memory
def test_warm_ends_after_its_last_restart(tmp_path):
    command = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode != 1)"
    options = ["--size", 1, "--max-restarts", 0, "--run-dir", tmp_path, "--kill", "0@3"]
    printed = run(sys.executable, "-c", command, python(), WARM, *options)
    assert "rank 0 died with status -9" in printed
    assert not fingerprints(printed)


@needs_memory
def test_torchrun_runs_warm_to_the_same_weights(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = ["--max-restarts=1", WARM, "--kill", "1@23", "--run-dir", tmp_path]
    printed = run(python(), *launcher, *options)
    assert "resumed after step 20: step 21, " in printed
    assert fingerprints(printed) == [undisturbed(WARM)]


@pytest.mark.parametrize("victim", [1, 2])  # the first is rank 0 of the first group
def test_survivors_train_on_and_a_new_process_joins(victim):
    printed = run(python(), SURVIVE, "--kill", f"{victim}@30")
    assert printed.count("was killed") == 1
    assert f"p{victim} was killed" in printed
    steps = re.findall(r"step (\d+) on world size (\d)", printed)
    assert steps == [("1", "3"), ("31", "2"), ("41", "3")]
    failed = re.findall(r"p(\d), step 31: `backward \(epoch 3, step 6\)` must be reached", printed)
    assert {*failed} == {"1", "2", "3"} - {str(victim)}
    assert fingerprints(printed) == [undisturbed(SURVIVE)] * 3
