"""What a bad input gets: each row of ``errors.md`` is tried on real ranks."""

import misuse
import misuse_launch
import pytest
from misuse import LABELS, ROWS, check, rows
from on_ranks import Raised

import pardata
import pardata.testing

# What only the library makes.
WITHOUT = {"CachedDataset", "LoadedKeys", "Progress", "RankLogger", "Restored", "World"}


@pytest.mark.parametrize(
    ("row", "size"),
    [
        pytest.param(row, size, id=f"{row.name}-{size}-{row.shown[:60]}")
        for row in ROWS
        for size in row.sizes
    ],
)
def test_a_bad_input_is_an_error_on_every_rank(row, size):
    outcomes = misuse_launch.outcomes if row in misuse_launch.STARTS else misuse.outcomes
    check(row, [of_rank[row] for of_rank in outcomes(size)])


def test_every_public_name_gets_bad_inputs():
    names = {*pardata.__all__, *(f"testing.{name}" for name in pardata.testing.__all__)}
    tried = {row.name for row in ROWS}
    assert names - tried <= WITHOUT
    assert tried <= names


def test_what_is_described_is_on_the_page():
    described = {*LABELS, *misuse_launch.VARIABLES, *misuse_launch.CODE}
    assert described <= {row.shown for row in ROWS}


# --- these tests can fail


PAGE = """
## f

| what is done | the error | on which ranks |
| --- | --- | --- |
| `f(1 \\| 2)` | `ValueError`: \\[`x`\\] must be 4,<br>but is … | {} |
"""


def said(text="[`x`] must be 4,\n  but is 5", kind="ValueError"):
    return Raised(kind, text, "None", 0.0)


TOLD = said(
    "rank 0 failed in `f`: ValueError: [`x`] must be 4,\n  but is 5\n"
    "rank 2 failed in `f`: ValueError: more\n(seen on rank 1, which did nothing wrong)",
    "RuntimeError",
)
OF_ONE, WITH_OTHERS = "rank 1 of 2", "rank 1 of 2, and the others get an error that names it"


@pytest.mark.parametrize(
    ("where", "outcomes"),
    [
        ("all of 2", [said(), None]),
        ("all of 2", [said(), said("x must be 4,\nbut is 5")]),
        ("all of 2", [said(), said(kind="TypeError")]),
        ("all of 2", [said(), said(TOLD.text.replace("Value", "Type"), "RuntimeError")]),
        (OF_ONE, [said(), said()]),
        (WITH_OTHERS, [None, said()]),
        (WITH_OTHERS, [said("rank 2", "RuntimeError"), said()]),
    ],
)
def test_a_rank_that_is_not_told_or_told_something_else_fails(where, outcomes):
    with pytest.raises(AssertionError):
        check(*rows(PAGE.format(where)), outcomes)
