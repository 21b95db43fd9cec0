"""MetricWriter: what is written, by whom, and what is refused."""

import json
import logging
import multiprocessing
import sys
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import run

from pardata import MetricWriter


@pytest.fixture
def _no_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


def lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_a_line_of_json_on_disk_at_once(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 0.5, "Prüfgüte/猫": 0.1})
        writer.write(2, {})
        assert lines(tmp_path) == [{"step": 1, "train/loss": 0.5, "Prüfgüte/猫": 0.1}, {"step": 2}]


NUMBERS = [
    (3, 3), (0.1, 0.1), (torch.tensor(2), 2), (torch.tensor([[2.5]]), 2.5), (np.array(7), 7),
    (torch.tensor(1.5, dtype=torch.bfloat16), 1.5), (torch.ones((), requires_grad=True), 1.0),
    (np.float32(0.5), 0.5), (np.float64(0.5), 0.5), (np.int64(7), 7),
    # What JSON has no number for is text.
    (float("nan"), "nan"), (torch.tensor(torch.inf), "inf"), (-1e999, "-inf"),
]  # fmt: skip


def test_numbers_of_every_kind_are_written(tmp_path):
    with MetricWriter(tmp_path) as writer:
        for value, _ in NUMBERS:
            writer.write(1, {"x": value})
    assert [line["x"] for line in lines(tmp_path)] == [number for _, number in NUMBERS]


@pytest.mark.parametrize("value", ["0.5", None, torch.tensor(1j), np.ones(2)], ids=str)
@pytest.mark.usefixtures("_no_tensorboard")
def test_what_is_no_number_is_named_and_nothing_is_written(tmp_path, value):
    with (
        MetricWriter(tmp_path) as writer,
        pytest.raises(TypeError, match=r"`values\['acc'\]` must"),
    ):
        writer.write(1, {"loss": 0.5, "acc": value})
    assert lines(tmp_path) == []


def test_write_after_close_raises_but_a_second_close_works(tmp_path):
    writer = MetricWriter(tmp_path)
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed file"):
        writer.write(1, {"x": 1})


HALF = '{"step": 1, "x": 0.'  # its run was killed here


@pytest.mark.parametrize(
    ("after", "left", "moved"),
    [(None, [1, 2, 2, 5], []), (5, [1, 2, 2, 5], []), (2, [1, 2, 2], [5]), (0, [], [1, 2, 2, 5])],
)
@pytest.mark.usefixtures("_no_tensorboard")
def test_lines_of_later_steps_are_moved_to_another_file(after, left, moved, tmp_path, caplog):
    directory = tmp_path / "runs" / "ä 1"  # made by the first
    for step in (1, 2, 2, 5):
        with MetricWriter(directory) as writer:
            writer.write(step, {"x": step})
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(HALF)
    with MetricWriter(str(directory), after=after) as writer:
        assert [line["step"] for line in lines(directory)] == left
        writer.write(6, {})
    assert lines(directory)[-1] == {"step": 6}
    *later, half = (directory / "metrics.removed.jsonl").read_text().splitlines()
    assert ([json.loads(line)["step"] for line in later], half) == (moved, HALF)
    (said,) = (each for each in caplog.records if "moved" in each.getMessage())
    assert said.levelname == "WARNING"
    assert f"moved {len(moved) + 1} of 5 lines of {directory}/metrics.jsonl" in said.getMessage()


# --- several writers, links and modes ---


def test_writers_of_one_directory_keep_each_others_lines(tmp_path):
    with MetricWriter(tmp_path) as train, MetricWriter(tmp_path, after=9) as other:
        train.write(1, {"loss": 1})
        other.write(5, {"acc": 1})
        with MetricWriter(tmp_path, after=1) as again:  # its line 5 goes
            train.write(2, {"loss": 2})
            other.write(3, {"acc": 2})
            again.write(4, {"x": 1})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


LONG = "x" * 20_000  # longer than the buffers of a file


def _write_many(directory, gate):
    sys.modules["torch.utils.tensorboard"] = None
    with MetricWriter(directory) as writer:
        gate.wait(60)
        for step in range(30):
            writer.write(step, {LONG: 1})


def test_processes_append_whole_lines_to_one_file(tmp_path):
    context = multiprocessing.get_context("forkserver")
    job = tmp_path, context.Barrier(3)
    writers = [context.Process(target=_write_many, args=job) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(line["step"] for line in lines(tmp_path)) == sorted([*range(30)] * 3)


@pytest.mark.parametrize("after", [None, 1])
@pytest.mark.usefixtures("_no_tensorboard")
def test_a_link_and_the_mode_of_the_file_stay(after, tmp_path):
    real = tmp_path / "elsewhere.jsonl"
    real.write_text('{"step": 1}\n{"step": 2}\n' + HALF)
    real.chmod(0o600)
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "metrics.jsonl"
    link.symlink_to(real)
    with MetricWriter(tmp_path / "run", after=after) as writer:
        writer.write(3, {})
    assert link.is_symlink()
    steps = [1, 2, 3] if after is None else [1, 3]
    assert [json.loads(line)["step"] for line in real.read_text().splitlines()] == steps
    removed = tmp_path / "run" / "metrics.removed.jsonl"
    assert [oct(path.stat().st_mode)[-3:] for path in (real, removed)] == ["600", "600"]


def test_a_link_to_a_directory_that_is_not_there_makes_it(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    MetricWriter(tmp_path / "link").write(1, {})
    assert lines(tmp_path / "disk" / "run") == [{"step": 1}]


# --- TensorBoard ---


def test_tensorboard_reads_what_was_written(tmp_path, monkeypatch):
    processing = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def scalars(name):
        events = processing.EventAccumulator(str(tmp_path)).Reload()
        return [(event.step, str(event.value)) for event in events.Scalars(name)]

    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 0.5, "acc": torch.tensor(0.25)})
        writer.write(2, {"train/loss": float("nan")})
    assert scalars("train/loss") == [(1, "0.5"), (2, "nan")]
    assert scalars("acc") == [(1, "0.25")]
    now = time.time
    # TensorBoard reads files in the order of their names: the second, and then "10" before "9".
    monkeypatch.setattr("time.time", lambda: now() + 1)
    with MetricWriter(tmp_path, after=1) as writer:
        writer.write(2, {"train/loss": 0.75})
    assert scalars("train/loss") == [(1, "0.5"), (2, "0.75")]


@pytest.mark.usefixtures("_no_tensorboard")
def test_without_tensorboard_there_is_json_alone_and_a_log_line(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("pardata.environment._logger.logged_once", set())
    with caplog.at_level(logging.INFO, logger="pardata"):
        for step in (1, 2):
            with MetricWriter(tmp_path) as writer:
                writer.write(step, {"x": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert caplog.text.count("TensorBoard is not installed: metrics go to metrics.jsonl only") == 1


# --- ranks ---


def _written_by_ranks(directory):
    rank = dist.get_rank()
    sys.modules["torch.utils.tensorboard"] = None
    with MetricWriter(directory / f"of-rank-{rank}") as writer:
        writer.write(rank, {"x": rank})
        if rank:
            writer.write(rank, {"x": "no number, but nobody looks"})


def test_only_rank_zero_writes(tmp_path):
    run(_written_by_ranks, tmp_path, world_size=3)
    assert [path.name for path in tmp_path.iterdir()] == ["of-rank-0"]
    assert lines(tmp_path / "of-rank-0") == [{"step": 0, "x": 0}]
