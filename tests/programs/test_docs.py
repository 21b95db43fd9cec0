"""The documentation is true: its code runs, its links lead somewhere, its reference is complete.

A comment before a code block tells how it runs (unmarked: alone, in this process):

    <!-- continues -->                   after the block before it, and what that one continues
    <!-- continues first -->             after the first block of the page
    <!-- ranks: 2 -->                    on that many processes
    <!-- raises: Type: part of text -->  it must raise this, on every rank
    <!-- raises on rank 0: Type: … -->   … on this rank alone
    <!-- needs: module -->               skipped where that cannot be imported
    <!-- tracker: module -->             test_trackers.py runs it, with a fake of that module
    <!-- not run: reason -->             for ``text`` and ``diff``, which are not run
"""

import contextlib
import doctest
import importlib.util
import inspect
import io
import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import get_overloads

import pytest
import torch
import torch.distributed as dist
from forked import python
from on_ranks import Raised, run_caught
from places import DOCS, ROOT
from scripts import printed_by

import pardata
import pardata.testing
from pardata.environment._logger import logged_once
from pardata.process_group._shutdown import shutdown
from pardata.rng._seeds import loader_counts, run_seed

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted(ROOT.glob("docs/*.md")),
]
LINKED = [*PAGES, *sorted(ROOT.glob("*/README.md"))]

# A text block proves nothing: there shall be few.
MOST_TEXT_BLOCKS = 18

RUN = ("python", "pycon", "bash", "console")
NOT_RUN = ("text", "diff")
MARKS = re.compile(r"continues( first)?|ranks|raises( on rank \d+)?|needs|tracker|not run")


@dataclass(frozen=True)
class Block:
    """A fenced block: its code begins on `line`, and `before` are those it continues."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str]
    before: tuple["Block", ...] = ()

    def __str__(self):
        return f"{self.page.relative_to(ROOT) if ROOT in self.page.parents else self.page}"

    @property
    def name(self):
        return f"{self}:{self.line}"

    @property
    def program(self):
        """The code of this block and of those before it, each on its own lines of the page."""
        lines = [""] * (self.line + self.text.count("\n"))
        for block in (*self.before, self):
            for offset, line in enumerate(block.text.splitlines()):
                lines[block.line - 1 + offset] = line
        return "\n".join(lines) + "\n"


def blocks(page):
    """Return the code blocks of a Markdown file, but for Sphinx's directives."""
    found: list[Block] = []
    marks: dict[str, str] = {}
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        fence = re.fullmatch(r"( *)(`{3,})(.*)", lines[at])
        comment = re.fullmatch(r"\s*<!-- ([^:]*?)(?:: (.*))? -->", lines[at])
        if fence:
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == fence[2])
            code = "\n".join(line[len(fence[1]) :] for line in lines[at + 1 : end])
            language = fence[3].strip()
            if not language.startswith("{"):
                before = _before(found, marks)
                found.append(Block(page, at + 2, language, code, marks, before))
            at, marks = end, {}
        elif comment and MARKS.fullmatch(comment[1]):
            marks[comment[1]] = comment[2] or ""
        elif lines[at].strip():
            marks = {}
        at += 1
    return found


def _before(found, marks):
    programs = [block for block in found if block.language == "python"]
    if "continues first" in marks:
        return (programs[0],)
    return (*programs[-1].before, programs[-1]) if "continues" in marks else ()


def runs(block, other):
    """Return whether to run `block` is to run `other` as well, and as its own marks say."""
    how, others = (
        {name: value for name, value in each.marks.items() if not name.startswith("continues")}
        for each in (block, other)
    )
    return other in block.before and how == others and not any(n.startswith("raises") for n in how)


def to_run(found):
    """Return a parameter for each block; one that another runs is of the long run."""
    return [
        pytest.param(
            block,
            id=block.name,
            marks=[pytest.mark.soak] if any(runs(other, block) for other in found) else [],
        )
        for block in found
    ]


RUNNABLE = [
    block
    for page in PAGES
    for block in blocks(page)
    if block.language in RUN and "tracker" not in block.marks
]


@pytest.fixture
def _restored():
    """Undo what the code of a page may do to this process."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    shutdown(None)
    logged_once.clear()
    run_seed.seed, run_seed.calls = None, 0
    loader_counts.clear()  # their default seeds count the loaders of a process
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if name.startswith("page_"):
            del sys.modules[name]
    assert not dist.is_initialized()


def run_program(file):
    """Import a page's program, so that its functions can be pickled, and run its tests."""
    os.chdir(Path(file).parent)
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for name, value in vars(module).copy().items():
        if name.startswith("test_"):
            value()


def run_program_on_rank(file):
    warnings.simplefilter("error")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run_program(file)
    return printed.getvalue()


def written(block, directory):
    file = directory / f"page_{re.sub('[^a-z]', '_', str(block.page.stem).lower())}_{block.line}.py"
    file.write_text(block.program, encoding="utf-8")
    return file


def run_python(block, directory):
    """Run a block as its marks say, and raise an `AssertionError` where it does otherwise."""
    size = int(block.marks.get("ranks", 1))
    file = written(block, directory)
    if size > 1:
        outcomes = run_caught(run_program_on_rank, file, world_size=size, timeout=60)
    else:
        outcomes = []
        try:
            outcomes.append(run_program(file))
        except Exception as error:  # what it is, the marks say
            if not any(mark.startswith("raises") for mark in block.marks):
                raise
            outcomes.append(Raised(type(error).__name__, str(error), "", 0))
    for rank, outcome in enumerate(outcomes):
        wanted = block.marks.get("raises") or block.marks.get(f"raises on rank {rank}")
        got = f"{outcome.type}: {outcome.text}" if isinstance(outcome, Raised) else None
        if wanted is None:
            assert got is None, f"{block.name}, rank {rank}: {got}"
        else:
            kind, _, part = wanted.partition(": ")
            assert got is not None, f"{block.name}, rank {rank}: raised nothing"
            assert got.startswith(f"{kind}:"), f"{block.name}, rank {rank}: {got}"
            assert part in got, f"{block.name}, rank {rank}: {got}"


def run_shell(block):
    """Run a shell block in the repository's root; what a console shows must be printed."""
    commands, shown = block.text, None
    if block.language == "console":
        lines = block.text.splitlines()
        commands = "\n".join(line[2:] for line in lines if line.startswith("$ "))
        shown = "\n".join(line for line in lines if not line.startswith("$ "))
    path = os.pathsep.join(
        [str(python().parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, f"{block.name}: {done.stderr}"
    if shown:
        assert done.stdout.strip() == shown.strip(), f"{block.name}: {done.stdout}"


def run_doctest(block):
    test = doctest.DocTestParser().get_doctest(
        block.text, {}, block.name, str(block.page), block.line - 1
    )
    printed = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not runner.run(test, out=printed.write).failed, printed.getvalue()


@pytest.mark.parametrize("block", to_run(RUNNABLE))
@pytest.mark.usefixtures("_restored")
def test_a_block_runs_as_it_says(block, tmp_path, monkeypatch):
    if needed := block.marks.get("needs"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)  # and back
    monkeypatch.setenv("PARDATA_TUNE_CPU", "0")  # it lasts, and the next tests count memory
    if block.language == "python":
        run_python(block, tmp_path)
    elif block.language == "pycon":
        run_doctest(block)
    else:
        run_shell(block)


def untrue_marks(found):
    """Name the blocks that could not be run, and are not excused."""
    for block in found:
        excused = bool(block.marks.get("not run"))
        if block.language in NOT_RUN and not excused:
            yield f"{block.name}: {block.language} needs <!-- not run: reason --> before it"
        elif block.language not in NOT_RUN and (excused or block.language not in RUN):
            kinds = f"one of {RUN}, or of {NOT_RUN} with a reason"
            yield f"{block.name}: {block.language!r} must be {kinds}"


def test_every_block_is_run_or_says_why_not():
    assert list(untrue_marks(block for page in PAGES for block in blocks(page))) == []


def test_few_blocks_are_not_run():
    texts = [block.name for page in PAGES for block in blocks(page) if block.language in NOT_RUN]
    assert len(texts) <= MOST_TEXT_BLOCKS, texts


def test_the_readmes_loop_prints_what_the_readme_shows(tmp_path):
    readme = blocks(ROOT / "README.md")
    first = next(number for number, block in enumerate(readme) if block.language == "python")
    program, shown = readme[first], readme[first + 1]
    assert (program.language, shown.language) == ("python", "text")
    sizes = {"$ python train.py": 1, "$ torchrun --standalone --nproc-per-node=2 train.py": 2}
    parts = re.split(r"^(\$ .*)\n", shown.text, flags=re.MULTILINE)[1:]
    assert parts[::2] == list(sizes), "other commands than those this test knows"
    file = written(program, tmp_path)
    for command, expected in zip(parts[::2], parts[1::2], strict=True):
        size = sizes[command]
        printed = run_caught(run_program_on_rank, file, world_size=size)
        assert printed[1:] == [""] * (size - 1), "only rank 0 prints"
        # The last digits depend on the processor's arithmetic.
        assert _numbers(printed[0]) == pytest.approx(_numbers(expected), abs=2e-3)
        assert _without_numbers(printed[0]) == _without_numbers(expected)


def _numbers(text):
    return [float(number) for number in re.findall(r"\d+\.?\d*", text)]


def _without_numbers(text):
    return re.sub(r"\d+\.?\d*", "N", text).strip()


def test_the_commands_for_contributors_are_those_of_ci():
    script = (ROOT / ".ci" / "run").read_text()
    first = next(block for block in blocks(ROOT / "CONTRIBUTING.md") if block.language == "text")
    commands = [part.strip() for part in re.split(r"\n|&&", first.text)]
    assert len(commands) >= 6
    # The script takes the line with pytest from the README, word for word.
    assert "readme_command test" in script
    tests = re.search(r'"\.\[test\]" && (.*)', (ROOT / "README.md").read_text())[1]
    run = {line.strip().replace("--quiet -r .ci/newest.txt ", "") for line in script.splitlines()}
    assert set(commands) - run == {tests}


# ------------------------------------------------------------------------------- links


def without_code(text):
    text = re.sub(r"^( *)(`{3,}).*?^ *\2 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page):
    """The anchors that a forge, and MyST, give to the headings of a page."""
    text = re.sub(
        r"^( *)(`{3,}).*?^ *\2 *$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    slugs: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        slugs[slug] = slugs.get(slug, -1) + 1
        if slugs[slug]:
            slugs[f"{slug}-{slugs[slug]}"] = 0
    return set(slugs)


def dead_links(page):
    text = without_code(page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    targets += re.findall(r"^\[[^\]]+\]: (\S+)", text, flags=re.MULTILINE)
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere: whether that answers is not ours to test
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            yield target


@pytest.mark.parametrize("page", LINKED, ids=[str(page.relative_to(ROOT)) for page in LINKED])
def test_every_relative_link_and_anchor_resolves(page):
    assert list(dead_links(page)) == []


@pytest.mark.parametrize("page", LINKED, ids=[str(page.relative_to(ROOT)) for page in LINKED])
def test_every_file_of_the_checkout_that_a_page_names_is_there(page):
    folders = r"(?:\.ci|\.github|benchmarks|docs|examples|src|tests)"
    named = re.findall(rf"(?<![\w/.-]){folders}/[\w./-]*\w", page.read_text(encoding="utf-8"))
    made = {"docs/_build"}
    assert [name for name in named if name not in made and not (ROOT / name).exists()] == []


def test_the_first_screen_of_the_readme_can_be_included():
    marker = re.search(r":end-before: (.*)", (ROOT / "docs/index.md").read_text())[1].strip('"')
    before, found, _ = (ROOT / "README.md").read_text(encoding="utf-8").partition(marker)
    assert found, f"docs/index.md ends the README at {marker!r}"
    # `relative-docs` and `relative-images` of the directive make those of docs/ links of the page.
    assert not re.search(r"\]\((?!https?:|docs/)", without_code(before)), "no link on the page"


def rows_of(page):
    """Return the rows of a page's tables by their first cell."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return {line.split(" | ")[0]: line for line in lines if re.match(r"\| [^|-]", line)}


def first_columns(row):
    return row.rstrip(" |").split(" | ")[:5]


def test_the_readmes_comparison_is_a_part_of_the_whole_one():
    whole = rows_of(DOCS / "comparison.md")
    heading = (
        "| | pardata | hand-written DDP | Accelerate | Fabric |\n| --- | --- | --- | --- | --- |\n"
    )
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition(heading)[2]
    rows = table.partition("\n\n")[0].replace("](docs/", "](").splitlines()
    assert len(rows) == 6
    for row in rows:
        assert first_columns(row) == first_columns(whole[row.split(" | ")[0]])


def test_no_page_names_a_path_of_somebodys_machine():
    private = re.compile(r"(?<![\w.~>])/(?:home|root|work|tmp|Users|mnt|opt|usr)\b|[A-Z]:\\")
    for page in [*LINKED, ROOT / "docs/conf.py"]:
        assert private.findall(page.read_text(encoding="utf-8")) == [], page


# --------------------------------------------------------------------------- reference

PUBLIC = {name: getattr(pardata, name) for name in pardata.__all__}
PUBLIC |= {f"testing.{name}": getattr(pardata.testing, name) for name in pardata.testing.__all__}
CLASSES = [value for value in PUBLIC.values() if isinstance(value, type)]


def first_line(value):
    return (inspect.getdoc(value) or "").partition("\n")[0]


def test_the_api_page_lists_every_public_name_and_documents_it():
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^   pardata\.([\w.]+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(PUBLIC)
    documented = re.findall(r"^\.\. auto(?:function|class):: pardata\.([\w.]+)", page, re.MULTILINE)
    assert set(PUBLIC) <= set(documented)


def test_the_reference_shows_as_required_what_backward_requires():
    parameters = inspect.signature(pardata.backward).parameters
    overloads = get_overloads(pardata.backward)  # Sphinx shows these
    assert len(overloads) == 2
    for overload in overloads:
        shown = inspect.signature(overload).parameters
        required = [name for name, given in shown.items() if given.default is given.empty]
        assert required == ["model", "loss_fn", "batch"]
        optional = {name: shown[name].default for name in shown if name not in required}
        assert [*required, *optional] == list(parameters)
        assert optional == {name: parameters[name].default for name in optional}
    for missing in range(1, len(required)):
        with pytest.raises(TypeError):
            pardata.backward(*[torch.nn.Linear(1, 1)] * missing)


def test_what_is_public_says_in_one_line_what_it_does():
    methods = {
        f"{cls.__name__}.{name}": value
        for cls in CLASSES
        for name, value in vars(cls).items()
        if not name.startswith("_") and callable(value)
    }
    lines = {name: first_line(value) for name, value in (PUBLIC | methods).items()}
    assert [name for name, line in lines.items() if not line.endswith(".")] == []


def test_the_types_of_every_public_name_are_pinned():
    pinned = (ROOT / "tests/typing/api.py").read_text(encoding="utf-8").partition("\ndef ")[2]
    names = [name.rpartition(".")[2] for name in PUBLIC]
    assert [name for name in names if not re.search(rf"\b{name}\b", pinned)] == []


# ------------------------------------------------------- these tests can fail, every one


def page_with(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def only(tmp_path, text):
    (block,) = blocks(page_with(tmp_path, text))
    return block


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize(
    ("marks", "code", "complaint"),
    [
        ("", "assert 1 == 2", None),
        ("<!-- ranks: 2 -->", "import pardata\nassert pardata.world().rank == 0", "rank 1: A"),
        ("<!-- raises: ValueError: x -->", "pass", "raised nothing"),
        ("<!-- raises: ValueError: x -->", "raise TypeError('x')", "TypeError: x"),
        ("<!-- raises: ValueError: x -->", "raise ValueError('y')", "ValueError: y"),
        (
            "<!-- ranks: 2 -->\n<!-- raises on rank 0: ValueError: x -->",
            "raise ValueError('x')",
            "rank 1: ValueError",
        ),
    ],
)  # fmt: skip
def test_a_block_that_does_otherwise_fails(marks, code, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = only(tmp_path, f"{marks}\n```python\n{code}\n```\n")
    with pytest.raises(AssertionError, match=complaint):
        run_python(block, tmp_path)


def test_a_wrong_output_in_a_shell_or_doctest_block_fails(tmp_path):
    with pytest.raises(AssertionError):
        run_shell(only(tmp_path, "```console\n$ echo one\ntwo\n```\n"))
    with pytest.raises(AssertionError):
        run_shell(only(tmp_path, "```bash\nfalse\ntrue\n```\n"))
    with pytest.raises(AssertionError, match="Expected:"):
        run_doctest(only(tmp_path, "```pycon\n>>> 1 + 1\n3\n```\n"))
    run_shell(only(tmp_path, "```console\n$ echo one\none\n```\n"))
    run_doctest(only(tmp_path, "```pycon\n>>> 1 + 1\n2\n```\n"))


def test_a_dead_link_is_found(tmp_path):
    page = page_with(
        tmp_path,
        "# One `two`\n# One two\n[a](page.md#one-two) [b](#one-two-1) [c](none.md) [d](#none)\n"
        "`[e](code.md)` [f](https://example.org) [g][g]\n\n[g]: gone.md\n",
    )
    assert list(dead_links(page)) == ["none.md", "#none", "gone.md"]


def test_the_first_picture_is_drawn_from_runs_of_both_kinds(tmp_path):
    out = tmp_path / "hero.svg"
    printed = printed_by(DOCS / "hero.py", "--epochs", 1, "--out", out)
    weights = {
        kind: set(re.findall(rf"^{kind}.*weights (\w+)", printed, flags=re.MULTILINE))
        for kind in ("hand-written DDP", "strategy")
    }
    assert {kind: len(hashes) for kind, hashes in weights.items()} == {
        "hand-written DDP": 3,
        "strategy": 1,
    }
    drawn = out.read_text()
    assert "one result" in drawn and "three results" in drawn  # noqa: PT018  # one picture
    assert all(found in drawn for hashes in weights.values() for found in hashes)
