"""A disk that needs longer for a file than the group waits for a collective: saves take long."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "checkpoint"))
from common_checkpoint import Run
from launched import launched

from pardata import Checkpointer, init

GROUP_WAITS = 2.0
SYNC_TAKES = 0.9  # a checkpoint syncs three files or more


def saves(strategy, directory, asynchronous):
    """Save twice on a slow disk; return how long the calls took, and whether all came back."""
    on_disk = os.fsync

    def slow(file):
        time.sleep(SYNC_TAKES)
        on_disk(file)

    with init(timeout=timedelta(seconds=GROUP_WAITS)):
        run = Run(strategy).train(2)
        os.fsync = slow
        seconds = []
        try:
            with Checkpointer(directory, asynchronous=asynchronous) as checkpointer:
                for step in (2, 3):
                    began = time.monotonic()
                    checkpointer.save(step, **run.objects())
                    seconds.append(time.monotonic() - began)
                    digest = run.digest()
        finally:
            os.fsync = on_disk
        other = Run(strategy, seed=1)
        found = Checkpointer(directory).restore(**other.objects())
        return seconds, found, other.digest() == digest


@pytest.mark.parametrize(
    ("strategy", "asynchronous"),
    [
        ("ddp", False),
        pytest.param("ddp", True, marks=pytest.mark.soak),
        pytest.param("fsdp", False, marks=pytest.mark.soak),
        pytest.param("fsdp", True, marks=pytest.mark.soak),
    ],
)
def test_saves_take_as_long_as_the_disk_and_no_rank_gives_up(strategy, asynchronous, tmp_path):
    for told in launched(saves, strategy, tmp_path / "run", asynchronous, size=2):
        (first, second), found, is_whole = told
        assert (found.step, is_whole) == (3, True)
        # The next one waits for the one in the background.
        assert second > GROUP_WAITS
        assert (first > GROUP_WAITS) != asynchronous
    steps = [f"attempt-0001-step-{step:09d}" for step in (2, 3)]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [*steps, "owner"]
