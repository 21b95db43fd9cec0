"""docs/howto-evaluation.md: on any number of processes one run, on rank 0, of the global values.

The clients of wandb and MLflow are not installed: `fakes` has what the page calls of them.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from launched import agent, torchrun_variables
from places import DOCS
from test_docs import blocks

FAKES = Path(__file__).parent / "fakes"
PROGRAMS = {
    block.marks["tracker"]: block.program
    for block in blocks(DOCS / "howto-evaluation.md")
    if "tracker" in block.marks
}


def run(programs, code, folder, size):
    """Run a program as torchrun does, next to the fakes."""
    for fake in FAKES.glob("*.py"):
        shutil.copy(fake, folder)
    with agent() as port:
        ranks = [
            programs.start(code, folder=folder, output=folder / f"{rank}.txt", **variables)
            for rank in range(size)
            for variables in [torchrun_variables(rank, size, port) if size > 1 else {}]
        ]
        ended = [rank.wait() for rank in ranks]
    assert ended == [0] * size, [(folder / f"{rank}.txt").read_text() for rank in range(size)]


def test_the_page_has_three_trackers_with_three_lines_each_on_rank_0():
    assert list(PROGRAMS) == ["wandb", "mlflow", "tensorboard"]
    for program in PROGRAMS.values():
        assert len(re.findall(r"if (world\.is_main|run|writer)\b", program)) == 3
        assert re.search(r"^        loss = all_reduce_mean", program, flags=re.MULTILINE)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_rank_0_alone_tells_the_tracker_the_mean_of_all(tracker, size, programs, tmp_path):
    run(programs, PROGRAMS[tracker], tmp_path, size)
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    mean = (size + 1) / 2
    points = [["log", {"train/loss": mean / step}, step] for step in (1, 2, 3)]
    assert calls == [["start"], *points, ["end"]]


def test_tensorboard_gets_one_file_with_the_mean_of_all(programs, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(programs, PROGRAMS["tensorboard"], tmp_path, 2)
    (file,) = (tmp_path / "runs" / "baseline").iterdir()
    found = EventAccumulator(str(file)).Reload().Scalars("train/loss")
    assert [point.step for point in found] == [1, 2, 3]
    assert [point.value for point in found] == pytest.approx([1.5, 0.75, 0.5])
