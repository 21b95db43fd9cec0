"""The packages: which imports which, what stands in an `__init__`, and how large things may be."""

import ast
import io
import re
import sys
import tokenize
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pardata

SOURCE = Path(pardata.__file__).parent

# From the ground up: a package imports only packages that stand before it.
ORDER = (
    *("store", "environment", "rng", "output", "collectives", "process_group", "data", "cache"),
    *("model", "strategies", "checkpoint", "testing", "doctor"),
)
TOP = {"_validation", "_pytree"}  # modules that know no other file, and may be used by all
EVERYBODYS = {"store"}  # which knows nothing of ranks, and may be used by all
MOST_ARROWS = 40
FACE = "pardata"
FILES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
LONGEST_FILE, LONGEST_FUNCTION = 300, 40
MOST_FILES, FEWEST_LINES = 97, 20
# Imported by multiprocessing's fork server, in which it changes the signals of all children.
SMALL = {"pardata.data._fork_server"}
MOST_LINES = 9_085


def imported(name):
    """Return the files that a file imports, anywhere in it; ``import pardata`` is of the face."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            own = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [module if module in FILES else node.module for module in own]
        else:
            continue
        found |= {module for module in modules if module in FILES}
    return found


KNOWS = {name: imported(name) for name in FILES}


def package(name):
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ORDER else None


def test_the_packages_are_these():
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ORDER)
    assert {path.stem for path in SOURCE.glob("*.py")} == {"__init__", "__main__", *TOP}


@pytest.mark.parametrize("name", [name for name in FILES if package(name)])
def test_a_file_knows_only_its_own_package_and_those_before_it(name):
    for other in KNOWS[name]:
        assert other != FACE, f"{name} imports the face of the package"
        own, known = package(name), package(other)
        if known is None:
            assert other.removeprefix("pardata.") in TOP, (name, other)
            continue
        assert known == own or ORDER.index(known) < ORDER.index(own), (name, other)
        # By path: an `__init__` imports the whole package, and may be half read when its files are.
        assert other.count(".") > 1, f"{name} imports the package {other}"


def test_no_two_files_know_each_other():
    # Also the imports inside functions: none of them may hide a circle. A package's __init__ is
    # read before its files, but asks nothing of who asked for them.
    files = {n: known for n, known in KNOWS.items() if FILES[n].name != "__init__.py"}
    order = list(TopologicalSorter(files).static_order())
    assert set(files) <= set(order)


def test_there_are_few_arrows_between_packages():
    arrows = {
        (package(name), package(other))
        for name, known in KNOWS.items()
        for other in known
        if package(name) and package(other) not in {None, package(name), *EVERYBODYS}
    }
    assert len(arrows) <= MOST_ARROWS


@pytest.mark.parametrize("name", ORDER)
def test_a_door_is_one_sentence_its_public_names_and_nothing_else(name):
    body = TREES[f"pardata.{name}"].body
    sentence = ast.get_docstring(TREES[f"pardata.{name}"])
    assert sentence, name
    assert len(sentence.split("\n\n")[0].splitlines()) == 1
    rest = body[1:]
    assert all(isinstance(node, ast.ImportFrom | ast.Assign) for node in rest)
    names = [
        alias.name for node in rest if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    public = next((ast.literal_eval(n.value) for n in rest if isinstance(n, ast.Assign)), [])
    assert sorted(names) == sorted(public)
    for node in rest:
        if isinstance(node, ast.ImportFrom):
            assert package(node.module) == name


def test_the_face_takes_its_names_from_the_doors():
    taken = [node for node in TREES[FACE].body if isinstance(node, ast.ImportFrom)]
    inits = {f"pardata.{name}" for name in ORDER}
    assert {node.module for node in taken} <= inits | {"pardata.environment._world"}


def test_files_in_a_package_are_private():
    names = [path.stem for path in SOURCE.rglob("*.py") if path.parent != SOURCE]
    assert all(name.startswith("_") for name in names)
    assert all(not KNOWS[f"pardata.{name}"] for name in TOP)


def test_no_two_files_have_one_name():
    names = [path.stem for path in SOURCE.rglob("*.py") if path.stem != "__init__"]
    assert len(names) == len(set(names))


def test_no_package_has_the_name_of_a_public_function():
    assert not set(ORDER) & set(pardata.__all__)


def test_at_the_top_of_a_file_only_the_required_packages_are_imported():
    allowed = {"pardata", "torch", *sys.stdlib_module_names}
    for name, tree in TREES.items():
        for node in tree.body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {module.split(".")[0] for module in modules} <= allowed, name


@pytest.mark.parametrize(
    "name", ["pardata.environment._launchers", "pardata.data._plan", "pardata.rng._seeds"]
)
def test_arithmetic_and_variables_know_no_other_file_and_nothing_distributed(name):
    text = FILES[name].read_text()
    assert KNOWS[name] == set()
    assert "import torch" not in text
    assert "from torch" not in text


# --- sizes


# Docstrings that tell users of CUDA what they will read.
NAMES_TO_USERS = {"pardata.environment._world", "pardata.process_group._init"}
ACCELERATORS = {"cuda", "nccl", "xpu", "mps", "npu", "hip", "rocr", "ascend", "nvidia"}


@pytest.mark.parametrize("name", [name for name in FILES if name != "pardata.environment._device"])
def test_only_one_file_names_accelerators(name):
    text = FILES[name].read_text()
    if name in NAMES_TO_USERS:
        for node in ast.walk(TREES[name]):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                text = text.replace(ast.get_docstring(node, clean=False) or "\0", "")
    named = ACCELERATORS & set(re.findall("[a-z]+", text.lower()))
    assert not named, f"{name} names {named}: what they differ in is for environment/_device.py"


def code_lines(path):
    """Return the numbers of the lines that are neither blank, comment nor docstring."""
    tree = ast.parse(path.read_text())
    holders = ast.Module | ast.ClassDef | ast.FunctionDef
    documented = [n for n in ast.walk(tree) if isinstance(n, holders) and ast.get_docstring(n)]
    prose = {i for n in documented for i in range(n.body[0].lineno, n.body[0].end_lineno + 1)}
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    return {
        number
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type not in empty | {tokenize.ENDMARKER}
        for number in range(token.start[0], token.end[0] + 1)
    } - prose


@pytest.mark.parametrize("name", FILES)
def test_files_and_functions_are_short(name):
    lines = code_lines(FILES[name])
    assert len(FILES[name].read_text().splitlines()) <= LONGEST_FILE
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef):
            body = range(node.body[0].lineno, node.end_lineno + 1)
            assert len(lines & set(body)) <= LONGEST_FUNCTION, f"{name}.{node.name}"


def test_the_source_does_not_grow():
    assert sum(len(code_lines(path)) for path in FILES.values()) <= MOST_LINES


def test_there_are_few_files_and_none_is_tiny():
    assert len(FILES) <= MOST_FILES
    lines = {n: len(code_lines(path)) for n, path in FILES.items() if path.name != "__init__.py"}
    assert {name for name, count in lines.items() if count < FEWEST_LINES} == SMALL
