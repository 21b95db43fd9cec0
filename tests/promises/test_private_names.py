"""Private names of torch: each has a row in a table, and a test that turns red if it changes."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from places import ROOT
from private_names import ROWS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SOURCE = ROOT / "src" / "pardata"
TREES = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
# What torch documents in spite of an underscore may stand anywhere: keys of a state_dict, and the
# functions of lists. The last two are parts of a name, and ours.
DOCUMENTED = re.compile(
    r"_(_.*|orig_mod|extra_state|foreach_\w+|pardata_\w+"
    r"|asdict|fields|replace|exit|getframe|current_frames|sdp_enabled|stays_arranged)"
)
MOST_FILES = 6


def names_of_ours():
    """Return the names that pardata defines, but for those of torch that it overrides."""
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    ours = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    ours |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    ours |= {n.arg for n in nodes if isinstance(n, ast.keyword)}
    for node in nodes:
        is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        ours |= {node.attr} if is_stored and ast.unparse(node.value) in ("self", "cls") else set()
    module = nn.Module()
    return {
        n for n in ours if n and not hasattr(module, n) and not hasattr(DistributedDataParallel, n)
    }


def used_in(tree):
    """Yield the attributes, texts, definitions and imports of torch in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.ImportFrom) and not node.module.startswith("pardata"):
            yield from (alias.name for alias in node.names)


def test_each_private_name_of_torch_has_a_row():
    ours, found = names_of_ours(), set()
    for path, tree in TREES.items():
        names = {one for one in used_in(tree) if re.fullmatch(r"_[A-Za-z]\w*", one)}
        private = {name for name in names - ours if not DOCUMENTED.fullmatch(name)}
        found |= {(name, path.relative_to(SOURCE).as_posix()) for name in private}
    assert found == {(row.name, row.file) for row in ROWS}
    assert len({row.file for row in ROWS}) <= MOST_FILES


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_its_test_exists(row):
    for test in row.tests:
        path, _, name = test.partition("::")
        assert f"\ndef {name}(" in (ROOT / path).read_text()


@pytest.mark.soak
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_its_test_turns_red_without_it(row, tmp_path):
    if "before 2.15" in row.use and torch.__version__ >= "2.15":
        pytest.skip("a name that only an older torch needs")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "src/pardata" / row.file
    path.write_text(re.sub(rf"\b{row.name}\b", f"{row.name}_", path.read_text()))
    env = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(tmp_path / "src")
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=1", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *row.tests], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    cannot_import = done.returncode == 4 and f"'{row.name}_'" in done.stdout + done.stderr
    assert done.returncode == 1 or cannot_import, done.stdout[-2000:]
