"""examples/articles/compare.py: the real file on real digits, what it runs and what it reads."""

import json
import re
import subprocess
import sys

import pytest
from forked import python
from places import ARTICLES

sys.path.insert(0, str(ARTICLES))

import compare
from compare_cells import Cell, CellError, measured_in
from compare_machine import machine

NONE = Cell("mnist", ("--data", "digits"), 1, "none", 1, 0)


def written_lines(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def table_rows(text, header):
    """Return the cells of the rows of the table whose header begins so."""
    (table,) = [part for part in text.split("\n\n") if re.match(rf"\| {header}", part)]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()[2:]]


# --- the real thing: microbatches of 1000 do not go into batches of 64, and only exact takes any


ARGUMENTS = ["--strategies", "none", "ddp", "exact", "--processes", "2", "--workers", "0"]
WRONG = ["--", "--microbatch-size", "1000"]
ERROR = "ValueError: `microbatch_size` must be"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison of which one cell fails: its folder, and the finished process."""
    out = tmp_path_factory.mktemp("compare")
    command = [str(python()), str(ARTICLES / "compare.py"), *ARGUMENTS, "--out", str(out), *WRONG]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    return out, done


def folder_of(out, strategy):
    (found,) = (out / "cells").glob(f"{strategy}-*")
    return found


def test_a_table_has_what_the_runs_have_written(compared):
    out, done = compared
    (none, ddp, _) = table_rows(done.stdout, "method  .* accuracy, % \\| time")
    for row, strategy in ((none, "none"), (ddp, "ddp")):
        last = json.loads((folder_of(out, strategy) / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["step"] == 22
        assert row[1:3] == [f"{last['test/accuracy']:.2f}", f"{last['time/epoch']:.2f}"]
    assert [none[0], ddp[0]] == ["none, 0 workers", "ddp, 2 processes, 0 workers"]
    assert [row[2] for row in table_rows(done.stdout, "method .* speed-up")] == ["1", "2"]
    assert f"{machine()}; 20" in done.stdout
    assert done.stdout.strip() == (out / "tables.md").read_text().strip()


def test_cells_report_their_times_and_failed_ones_their_error(
    compared,
):
    out, done = compared
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "FAILED:" in line]
    assert line.startswith(f"[3/3] exact, 2 processes, 0 workers: FAILED: {ERROR}")
    assert str(folder_of(out, "exact")) in line
    assert done.stderr.splitlines()[-1] == "1 of 3 cells FAILED, as said above"
    none, ddp = done.stderr.splitlines()[:2]
    assert re.match(r"\[1/3\] none, 0 workers: measured: [\d.]+ s, [\d.]+ s of them wai", none)
    assert re.match(r"\[2/3\] ddp, 2 processes, 0 workers: measured: ", ddp)
    assert ["exact, 2 processes, 0 workers", "failed", "", ""] in table_rows(
        done.stdout, "method  .* accuracy, % \\| time"
    )


def test_finished_cells_are_not_run_again(compared, capsys):
    out, first = compared
    before = (folder_of(out, "none") / "metrics.jsonl").stat().st_mtime_ns
    arguments = [word for word in ARGUMENTS if word != "exact"]
    assert compare.main([*arguments, "--out", str(out), *WRONG]) == 0
    printed = capsys.readouterr()
    assert re.findall(r": (kept|measured|FAILED): ", printed.err) == ["kept", "kept"]
    assert (folder_of(out, "none") / "metrics.jsonl").stat().st_mtime_ns == before
    header = "method  .* accuracy, % \\| time"
    assert table_rows(printed.out, header) == table_rows(first.stdout, header)[:2]


# --- what a run leaves


ROWS = [
    {"step": 10, "train/loss": 1.0},
    {"step": 11, "test/accuracy": 50.0, "time/epoch": 3.0, "time/waiting": 1.0},
    {"step": 22, "test/accuracy": 60.0, "time/epoch": 2.0, "time/waiting": 0.5},
]


def test_times_of_epochs_are_added_and_an_early_end_fails(tmp_path):
    whole = {"accuracy": 60.0, "seconds": 5.0, "waited": 1.5, "steps": 22}
    assert measured_in(written_lines(tmp_path, ROWS), 2) == whole
    with pytest.raises(CellError, match=r"^it ended after 1 of 2 epochs$"):
        measured_in(written_lines(tmp_path, ROWS[:2]), 2)
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(CellError, match=r"^it ended after 0 of 1 epoch$"):
        measured_in(tmp_path, 1)


# --- what is run


def planned(*arguments):
    return compare.cells(compare.parse(arguments))


def test_none_and_dp_run_in_one_process_without_duplicates():
    cells = planned("--strategies", "none", "dp", "ddp", "--processes", "2", "3", "2",
                    "--workers", "0", "4", "--cache", "no", "yes")  # fmt: skip
    assert len(cells) == len(set(cells)) == 16
    assert {c.processes for c in cells if c.strategy in ("none", "dp")} == {1}
    assert {c.processes for c in cells if c.strategy == "ddp"} == {2, 3}
    for cell in cells:
        assert ("--cache" in cell.command()) == cell.cache
        assert ("torch.distributed.run" in cell.command()) == (cell.strategy == "ddp")
