"""The page on the architecture names packages and files that there are."""

import ast
import importlib
import re

import pytest
from places import DOCS, ROOT
from test_architecture import FILES, KNOWS, ORDER, SOURCE, TREES, package

PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
PICTURE = (DOCS / "images" / "packages.svg").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in row.strip("|").split("|")]
    for row in re.findall(r"^\| `.*\|$", PAGE, re.MULTILINE)
]


def names(cell):
    return re.findall(r"`(\w+)`", cell)


def public_names(init):
    (assigned,) = [n for n in TREES[init].body if isinstance(n, ast.Assign)] or [None]
    return [] if assigned is None else ast.literal_eval(assigned.value)


def test_the_table_has_all_packages_in_their_order():
    assert [names(row[0]) for row in ROWS] == [[name] for name in ORDER]


@pytest.mark.parametrize("row", ROWS, ids=ORDER)
def test_a_package_is_as_its_init_says(row):
    (name,), sentence, public = names(row[0]), row[1], names(row[2])
    init = f"pardata.{name}"
    assert sentence == ast.get_docstring(TREES[init]).split("\n")[0]
    assert sorted(public) == sorted(public_names(init))


@pytest.mark.parametrize("row", ROWS, ids=ORDER)
def test_a_package_imports_what_the_table_says(row):
    (name,) = names(row[0])
    known = {package(other) for file in FILES if package(file) == name for other in KNOWS[file]}
    assert names(row[3]) == [other for other in ORDER if other in known - {name, None}]


def test_every_file_that_the_page_names_is_there():
    named = set(re.findall(r"`([\w./]+\.(?:py|md))`", PAGE))
    assert named
    missing = [n for n in named if not ((SOURCE / n).exists() or (ROOT / n).exists())]
    assert [n for n in missing if not (SOURCE.parent / n).exists()] == []


def test_every_import_path_of_the_page_leads_to_something():
    paths = set(re.findall(r"`((?:\w+\.)+_\w+(?:\.\w+)*)`", PAGE))
    assert len(paths) > 40
    for path in paths:
        module, names = re.fullmatch(r"((?:\w+\.)*?_\w+)((?:\.\w+)*)", path).groups()
        found = importlib.import_module(f"pardata.{module}")
        for name in names.split(".")[1:]:
            found = getattr(found, name)


def test_every_package_is_in_the_picture():
    assert set(re.findall(r'class="b m">(\w+)<', PICTURE)) == set(ORDER)
