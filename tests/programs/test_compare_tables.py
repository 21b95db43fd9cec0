"""The tables and pictures that examples/articles/compare.py makes of its results."""

import sys
from dataclasses import replace

from places import ARTICLES
from test_compare import NONE, table_rows

sys.path.insert(0, str(ARTICLES))

from compare_cells import Result
from compare_tables import Row, tables

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


def test_a_ratio_is_the_median_of_the_ratios_within_a_round():
    slow = Row(NONE, [result(10), result(30), result(12)])
    fast = Row(DDP, [result(5), result(10), result(10)])
    assert fast.speed_up_over(slow) == 2
    assert slow.seconds == 12
    assert "the median of 3 rounds; within a row the longest time is at most 200 % above" in tables(
        [slow, fast]
    )


# --- pictures
