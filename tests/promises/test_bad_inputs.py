"""What a bad input gets: the page that the tests of misuse make.

``PYTHONPATH=tests python tests/promises/test_bad_inputs.py --write docs/errors.md`` makes it anew.
"""

import sys
from pathlib import Path

import misuse_across_ranks
import misuse_data
import misuse_launch
import misuse_models
import misuse_runs
import pytest
from misuse import check, in_markdown, parameters, row, section, stable, tried
from on_ranks import Raised, end_all
from places import DOCS

import pardata
import pardata.testing

PAGE = DOCS / "errors.md"

MODULES = [
    misuse_launch,
    misuse_models,
    misuse_data,
    misuse_across_ranks,
    misuse_runs,
]

HEAD = """\
# Errors

What a wrong start, a wrong argument or ranks that differ get: an error at the call that is wrong,
on every rank, that says what must be, what is, and what to do. Made by the tests, which try each
line on real processes:
`PYTHONPATH=tests python tests/promises/test_bad_inputs.py --write docs/errors.md`.

In the first column, `rank` is the number of the rank: `4 if rank == 0 else 0` is a mistake on some
ranks only. `TEN` is a dataset of ten samples, `net()` a small model, `wrapped()` what `wrap_model`
makes of it, `epoch_of(…)` a loader that is read through; `load(…)` loads a loader's state of which
some keys were changed, `cache(…)` is `cache_dataset` with a directory of its own. `save(…)`,
`restore(…)` and `export(…)` are those of a `Checkpointer`, which has saved a `model` and the value
`best` before it restores; `save_at(…)` saves in another directory.

The last column says which ranks got the error, at which numbers of processes; a rank that did
nothing wrong gets an error that names the one that did. "…" stands for what depends on the machine
or on the release of torch.
"""

# What only the library makes.
WITHOUT = {"Restored", "World"}


def page():
    lines = [HEAD.rstrip()]
    for module in MODULES:
        lines += section(module)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("module", "case", "size"), [one for module in MODULES for one in parameters(module)]
)
def test_a_bad_input_is_an_error_on_every_rank(module, case, size):
    check(case, tried(module, case, size))


def test_the_page_of_errors_is_what_was_said():
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run `PYTHONPATH=tests python tests/promises/test_bad_inputs.py --write docs/errors.md`"
    )


def test_every_public_name_gets_bad_inputs():
    names = {*pardata.__all__, *(f"testing.{name}" for name in pardata.testing.__all__)}
    tried = {name for module in MODULES for name in module.CASES}
    assert names - tried <= WITHOUT
    assert tried <= names


# --- these tests can fail


def a_case(**changes):
    return misuse_models.case("f()", "ValueError", "must be", "is 5", **changes)


def said(text="`x` must be 4, but is 5", kind="ValueError"):
    return Raised(kind, text, "None", 0.0)


@pytest.mark.parametrize(
    ("changes", "outcomes"),
    [
        ({}, [said(), None]),
        ({}, [said(), said("`x` is 5 and must be 4")]),
        ({}, [said(), said(kind="TypeError")]),
        ({}, [said(), said("rank 0 failed in `f`: TypeError: must be, is 5", "RuntimeError")]),
        ({"ranks": (1,)}, [said(), said()]),
        ({"ranks": (1,), "others": "rank 1"}, [None, said()]),
        ({"ranks": (1,), "others": "rank 1"}, [said("rank 2", "RuntimeError"), said()]),
    ],
)
def test_a_rank_that_is_not_told_or_told_something_else_fails(changes, outcomes):
    with pytest.raises(AssertionError):
        check(a_case(**changes), outcomes)


def test_a_rank_that_did_nothing_wrong_may_be_told_which_one_did():
    told = said("rank 0 failed in `f`: ValueError: must be 4, is 5", "RuntimeError")
    check(a_case(), [said(), told])
    check(a_case(ranks=(1,), others="rank 1"), [said("rank 1", "RuntimeError"), said()])
    check(a_case(ranks=(1,)), [None, said()])


def test_what_depends_on_the_machine_is_left_out():
    assert stable("in /some/a-1/b.py, at 127.0.0.1:29500") == "in …/b.py, at 127.0.0.1:…"
    assert stable("there is none; there are a, b") == "there is none; there are …"
    assert stable("word " * 200).endswith("word …")


def test_what_a_table_would_take_for_its_own_is_escaped():
    text = in_markdown("a|b `c|d_e_` __len__ [1] <x>\n  rank 1")
    assert text == "a\\|b `c\\|d_e_` \\_\\_len\\_\\_ \\[1\\] \\<x\\><br>rank 1"


def test_a_row_is_of_one_line():
    module = misuse_across_ranks
    for case in module.CASES["barrier"]:
        assert row(module, case).count("\n") == 0


def main():
    try:
        if sys.argv[1:2] == ["--write"]:
            Path(sys.argv[2]).write_text(page(), encoding="utf-8")
        else:
            print(page())
    finally:
        end_all()


if __name__ == "__main__":
    main()
