"""The figures of the pages are those of `benchmarks/results`, and each target is in use."""

import json
import re
import sys

import pytest
from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import _figures  # path first
from _targets import TARGETS  # likewise

PAGES = dict(_figures.pages())


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_page_has_the_figures_of_the_results(page):
    assert page.read_text(encoding="utf-8") == PAGES[page], "run python benchmarks/_figures.py"


def test_another_figure_is_found():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(_figures.MARK.findall(text)) >= 8
    changed = re.sub(r"(<!--mlp-->)[\d.]+", r"\g<1>1.00", text)
    assert changed != text
    assert _figures.quoted(changed) == text
    with pytest.raises(KeyError):
        _figures.quoted("<!--unknown-->1<!---->")


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_no_line_begins_with_a_figure(page):
    # Markdown would take it for a block of HTML.
    assert (
        re.findall(r"^\s*<!--[a-z][\w-]*-->.*<!---->.*", page.read_text("utf-8"), re.MULTILINE)
        == []
    )


def test_each_figure_is_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert {name for name, _ in _figures.MARK.findall(text)} == set(_figures.FIGURES)


def test_each_target_is_that_of_a_result():
    found = set(_figures.TARGETS_OF_TABLES)
    for path in _figures.RESULTS.glob("*.json"):
        for rows in json.loads(path.read_text()).get("tables", {}).values():
            found |= {row["target"] for row in rows} - {""}
    assert found == set(TARGETS)


def test_the_results_of_cpus_are_of_one_commit_and_machine():
    assert re.fullmatch(r"[0-9a-f]{8}", _figures.commit())
    machines = {
        tuple(_figures.result(path.stem)["environment"][name] for name in ("CPU", "cores", "torch"))
        for path in _figures.RESULTS.glob("*.json")
        if not path.stem.startswith("gpu")
    }
    assert len(machines) == 1
