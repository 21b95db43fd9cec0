"""The tables and pictures that examples/articles/compare.py makes of its results."""

import sys
from dataclasses import replace

import pytest
from places import ARTICLES
from test_compare import NONE, table_rows

sys.path.insert(0, str(ARTICLES))

import compare
import compare_plots
from compare_cells import Result
from compare_tables import Row, efficiency, families, tables

DDP = replace(NONE, strategy="ddp")


def result(seconds, *, waited=0.5, steps=10, accuracy=90.0):
    return Result(accuracy, seconds, waited, steps, seconds + 3, 0.1, "2026-11-21")


# --- tables


def test_the_tables_say_how_methods_workers_and_processes_compare():
    rows = [
        Row(NONE, [result(10)]),
        Row(DDP, [result(12.5)]),
        Row(replace(NONE, workers=2), []),
        Row(replace(DDP, processes=4), [result(5, waited=1)]),
    ]
    text = tables(rows)
    assert table_rows(text, "method .* accuracy, % \\| time") == [
        ["none, 0 workers", "90.00", "10.00", "1.00"],
        ["ddp, 1 process, 0 workers", "90.00", "12.50", "1.25"],
        ["none, 2 workers", "failed", "", ""],
        ["ddp, 4 processes, 0 workers", "90.00", "5.00", "0.50"],
    ]
    assert table_rows(text, "method .* load") == [
        ["none", "0", "0.0500", "0.9500", "10.00", "90.00"],
        ["none", "2", "failed", "", "", ""],
        ["ddp, 1 process", "0", "0.0500", "1.2000", "12.50", "90.00"],
        ["ddp, 4 processes", "0", "0.1000", "0.4000", "5.00", "90.00"],
    ]
    assert table_rows(text, "method .* speed-up") == [
        ["none", "0", "1", "10.00", "1.00", "100"],
        ["ddp, 1 process", "0", "1", "12.50", "0.80", "80"],
        ["ddp, 4 processes", "0", "4", "5.00", "2.00", "50"],
    ]
    assert text.endswith("Each figure is one measurement.")
    written = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert [len(set(map(len, lines))) for lines in written] == [1, 1, 1]  # aligned


def test_without_a_single_process_the_fewest_are_the_base():
    two, four = (Row(replace(DDP, processes=n), [result(20 / n)]) for n in (2, 4))
    assert families([four, two]) == [[two, four]]
    assert efficiency(four, two) == pytest.approx(100)
    assert "speed-up" not in tables([two])
    assert families([Row(NONE, [result(1)]), Row(replace(NONE, strategy="dp"), [result(1)])]) == []


def test_other_workers_and_caches_have_a_base_of_their_own():
    cells = [(NONE, 10), (replace(NONE, workers=2), 8)]
    cells += [(replace(cell, strategy="ddp", processes=2), s / 2) for cell, s in cells]
    rows = [Row(cell, [result(seconds)]) for cell, seconds in cells]
    assert families(rows) == [[rows[0], rows[2]], [rows[1], rows[3]]]


def test_a_ratio_is_the_median_of_the_ratios_within_a_round():
    slow = Row(NONE, [result(10), result(30), result(12)])
    fast = Row(DDP, [result(5), result(10), result(10)])
    assert fast.speed_up_over(slow) == 2
    assert slow.seconds == 12
    assert "the median of 3 rounds; within a row the longest time is at most 200 % above" in tables(
        [slow, fast]
    )


def test_a_cell_with_a_failed_round_has_failed():
    outcomes = {NONE: result(1), replace(NONE, round=1): "ValueError: no", DDP: result(2)}
    failed, good = compare.rows(outcomes)
    assert (failed.cell, list(failed.results)) == (NONE, [])
    assert (good.cell, list(good.results)) == (DDP, [result(2)])


# --- pictures


def test_a_bar_is_as_long_as_its_run_took():
    figure = compare_plots.methods([Row(NONE, [result(10)]), Row(DDP, [result(20, accuracy=80)])])
    load, update = figure.axes[0].containers
    ends = [bar.get_x() + bar.get_width() for bar in update]
    assert ends == pytest.approx([10, 20])
    assert [bar.get_width() for bar in load] == pytest.approx([0.5, 0.5])
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert shown == [" 10.0 s, 90.0 %", " 20.0 s, 80.0 %"]


def test_lines_over_workers_are_drawn_where_these_vary():
    rows = [Row(replace(NONE, workers=n), [result(10, waited=5 - n)]) for n in (4, 0)]
    load, update = compare_plots.workers([*rows, Row(DDP, [result(1)])]).axes
    (line,) = load.lines
    assert list(line.get_xdata()) == [0, 4]
    assert list(line.get_ydata()) == pytest.approx([500, 100])
    assert list(update.lines[0].get_ydata()) == pytest.approx([500, 900])


def test_speed_up_and_efficiency_are_drawn_beside_the_ideal():
    rows = [Row(replace(DDP, processes=n), [result(12 / n + 1)]) for n in (1, 2, 4)]
    speed_up, share = compare_plots.processes([Row(NONE, [result(12)]), *rows]).axes
    ideal, line = speed_up.lines
    assert list(ideal.get_ydata()) == [1, 2, 4]
    assert list(line.get_ydata()) == pytest.approx([12 / 13, 12 / 7, 3])
    assert list(share.lines[1].get_ydata()) == pytest.approx([1200 / 13, 600 / 7, 75])


def test_only_pictures_of_something_are_written(tmp_path):
    drawn = compare_plots.draw([Row(NONE, [result(1)]), Row(DDP, [])], tmp_path)
    assert drawn == [tmp_path / "methods.png"]
    assert drawn[0].read_bytes().startswith(b"\x89PNG")
    assert compare_plots.draw([Row(DDP, [])], tmp_path) == []
