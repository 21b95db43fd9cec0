"""Runs whose processes are killed at any moment end with the weights of an undisturbed one."""

import sys
from pathlib import Path

import pytest
from killing import killed, undisturbed

pytestmark = pytest.mark.skipif(
    not Path("/proc").is_dir() or sys.platform != "linux", reason="finds its victims in /proc"
)


def survives(run_dir, kills, sizes, seed, *options):
    """Kill a run so often, and return its story, if nothing was lost."""
    story = killed(run_dir, kills, sizes, seed, *options)
    ended = story.ended
    assert ended == undisturbed(run_dir / "undisturbed", ended.steps)
    assert ended.least == ended.most > 0  # each sample once in an epoch
    checkpoints = run_dir / "checkpoints"
    left = [path.name for path in checkpoints.iterdir() if path.name.startswith(".")]
    assert left == []  # by what was killed
    assert len(list(checkpoints.glob("attempt-*-step-*"))) == 3
    assert not list((run_dir / "cache").glob("pardata-building*"))
    return story


@pytest.mark.parametrize("options", [(), pytest.param(("--asynchronous",), marks=pytest.mark.soak)])
def test_a_run_that_is_killed_twice_loses_nothing(options, tmp_path):
    story = survives(tmp_path, 2, [2], None, *options)
    assert sum(story.kills.values()) == 2


@pytest.mark.soak
def test_a_run_that_is_killed_two_hundred_times_loses_nothing(tmp_path, capsys):
    total = 0
    for number, options in enumerate([(), ("--asynchronous",)]):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        story = survives(run_dir, 100, [2, 1, 3], number, *options)
        total += sum(story.kills.values())
        with capsys.disabled():
            print(f"\n{' '.join(options) or 'synchronous'}: {story}")
    assert total >= 200
