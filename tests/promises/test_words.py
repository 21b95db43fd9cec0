"""Plain English in the source: what a program can count of the rules in CONTRIBUTING.md."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

import pardata

SOURCE = Path(pardata.__file__).parent
FILES = [str(path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.py"))]
MOST_WORDS = 25

# The words of rules 1, 3, 4, 6, 7 and 9. "size" is not here: a world and a batch have one. Nor is
# "where": it is right of a place.
BANNED = (
    *("go on", "goes on", "going on", "went on", "stand in", "stands in", "stand-in", "noise"),
    *("piece", "pieces", "dear", "dearer", "mend", "mends", "mended", "shall", "beside", "besides"),
    *("save that", "next to nothing", "none is lost", "is refused", "are refused", "for nobody"),
)
BAD_WORD = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
BAD_BEGINNING = re.compile(r"(of|which|for|but)\b", re.IGNORECASE)
MARK = r"(noqa|type: ignore|pyright: ignore)(: ?[A-Z0-9, ]+|\[[\w, -]*\])?"
NO_REASON = re.compile(rf"(# )?{MARK}(\s*# {MARK})*\s*(# (likewise|as above).*)?$")
# Words of our own where PyTorch's docs have one: a rank is sent a value, and not told it.
DIALECT = {
    *("tell", "tells", "told", "say", "said", "hear", "hears", "heard", "doing", "whereabouts"),
    *("rider", "riders", "parcel", "parcels", "guest", "guests", "verdict", "verdicts", "tally"),
    *("settle", "settles", "settled", "door", "doors", "room", "rooms", "house", "houses"),
}
# These are right in a sentence, and in a name they are "local", "full", "remaining", "registry".
IN_NAMES = {"own", "whole", "here", "left", "likes", "known"}
# Names in which the plain English word is the right one: file and identifier.
RIGHT = {
    ("checkpoint/_manifest.py", "tell"),  # a method of files
    ("data/_sampler.py", "bisect_left"),
    ("data/_plan.py", "bisect_left"),
    ("strategies/exact/_tree_gradients.py", "left"),  # of the two halves of a node
    ("strategies/exact/_tree_all_reduce.py", "left"),
    ("strategies/exact/_tree_all_reduce.py", "_left"),
}
CODE = re.compile(r"\s*(>>>|=====|Examples?:)")
SECTION = re.compile(r"(Args|Attributes|Raises|Returns):$")
# What begins a sentence in any case: an argument, with its name, and an item of a list.
ENTRY, ITEM = re.compile(r" {4}\w+(, \w+)*: "), re.compile(r"\s*([*-]|\d\.|\w+ ) +")


def docstrings(text):
    """Yield each docstring of a file, with the line that it begins in."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is not None:
                yield node.body[0].lineno, docstring


def sentences(docstring):
    """Yield the sentences of a docstring, with each name in it as one word, and no code."""
    text = re.sub(r"``.*?``|`.*?`", "X", docstring, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.splitlines()
        if CODE.match(lines[0]):
            continue
        begins = ENTRY if SECTION.match(lines[0]) else ITEM
        entries = [""]
        for line in lines:
            if beginning := begins.match(line):
                entries.append("")
            entries[-1] += line[beginning.end() if beginning else 0 :].strip() + " "
        for entry in entries:
            yield from re.split(r"(?<=[.!?])[)\"]*\s+", entry)


def comments(text):
    """Yield each comment of a file, those of several lines as one, with its first line."""
    last = (-1, -1)
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            is_alone = not token.line[:column].strip()
            if is_alone and last == (line - 1, column):
                found[-1][1] += token.string.removeprefix("#")
            else:
                found.append([line, token.string.removeprefix("#")])
            last = (line, column) if is_alone else (-1, -1)
    return [(line, comment.strip()) for line, comment in found]


def faults(text):
    """Yield what a file says in other than plain words."""
    for line, docstring in docstrings(text):
        for sentence in sentences(docstring):
            words = re.findall(r"[\w*][\w'./*-]*", sentence)
            if len(words) > MOST_WORDS:
                yield line, f"{len(words)} words: {sentence}"
            if bad := BAD_WORD.search(sentence):
                yield line, f"{bad[0]!r}: {sentence}"
    for line, comment in comments(text):
        if BAD_BEGINNING.match(comment):
            yield line, f"begins with {comment}"
        if NO_REASON.match(comment):
            yield line, f"no reason: {comment}"
        if bad := BAD_WORD.search(re.sub(r"`.*?`", "X", comment)):
            yield line, f"{bad[0]!r}: {comment}"


def identifiers(text):
    """Yield each identifier of a file, those in f-strings too, with its line."""
    for node in ast.walk(ast.parse(text)):
        for field in ("name", "asname", "id", "attr", "arg"):
            if isinstance(identifier := getattr(node, field, None), str):
                yield node.lineno, identifier


def dialect(text, name=""):
    """Yield the words of the dialect in a file: in its identifiers, comments and docstrings."""
    for line, identifier in identifiers(text):
        words = {*identifier.lower().split("_")} & (DIALECT | IN_NAMES)
        if words and (name, identifier) not in RIGHT:
            yield line, f"{min(words)!r} in the name {identifier}"
    for line, prose in [*docstrings(text), *comments(text)]:
        words = re.findall(r"\w+", re.sub(r"``.*?``|`.*?`", "X", prose, flags=re.DOTALL).lower())
        for word in sorted(DIALECT.intersection(words)):
            yield line, f"{word!r} in: {prose[:80]} …"


@pytest.mark.parametrize("name", FILES)
def test_the_words_are_those_of_the_field(name):
    found = [
        f"{name}:{line}: {fault}" for line, fault in dialect((SOURCE / name).read_text(), name)
    ]
    assert not found, "\n".join(found)


def test_each_exception_from_the_words_is_in_use():
    for name, identifier in RIGHT:
        assert identifier in {found for _, found in identifiers((SOURCE / name).read_text())}


@pytest.mark.parametrize(
    "text",
    [
        "own_tensors = 1",
        "def f():\n    return left",
        "class Verdict: ...",
        "x = f'{here.rank}'",
        "f(likes=1)",
        "import a as known",
        '"""Return what all ranks have told."""',
        "x = 1  # each with room of\n# its own",
    ],
)
def test_a_word_of_the_dialect_is_found(text):
    assert len(list(dialect(text))) == 1
    assert not list(dialect("bisect_left(1)", "data/_sampler.py"))


@pytest.mark.parametrize("name", FILES)
def test_the_words_are_plain(name):
    found = [f"{name}:{line}: {fault}" for line, fault in faults((SOURCE / name).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        f'"""Say {"one more " * 12}word too many."""',
        f'def f():\n    """Say it.\n\n    Args:\n        name: {"one more " * 13}word.\n    """',
        '"""Let the run go on."""',
        "x = 1  # of the others",
        "# It goes\n# on.",
        "import torch  # noqa: PLC0415",
        "import torch  # type: ignore[attr-defined]  # noqa: SLF001  # likewise",
    ],
)
def test_a_fault_is_found(text):
    assert len(list(faults(text))) == 1
