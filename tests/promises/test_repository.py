"""What holds for all files of the repository: pinned workflows, and short names of tests."""

import ast
import re

from places import ROOT

FORGE = ROOT / ".github"
WORKFLOWS = sorted(FORGE.glob("workflows/*.yml"))
MOST_WORDS = 12  # of the name of a test


def unpinned(text):
    """Return the actions of others that are not named by a commit and, in a comment, a version."""
    used = re.findall(r"uses: (?!\./)(.*)", text)
    return [
        one for one in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", one)
    ]


def test_each_action_is_pinned_by_its_hash():
    texts = [file.read_text(encoding="utf-8") for file in WORKFLOWS]
    assert sum(text.count("uses: ") for text in texts) == 8
    assert [unpinned(text) for text in texts] == [[]] * len(texts)
    assert unpinned("- uses: actions/checkout@v4\n- uses: a/b@" + "0" * 40) == [
        "actions/checkout@v4",
        "a/b@" + "0" * 40,
    ]


def long_names(text):
    """Return the names of tests of more than `MOST_WORDS` words after ``test_``."""
    names = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return [name for name in names if re.match(rf"test(_[^_]+){{{MOST_WORDS + 1}}}", name)]


def test_no_name_of_a_test_has_more_than_twelve_words():
    texts = {file: file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("*.py")}
    assert len(texts) > 100
    found = [
        f"{file.relative_to(ROOT)}:{name}" for file in texts for name in long_names(texts[file])
    ]
    assert not found, "\n".join(found)
    short, long = "_word" * MOST_WORDS, "_word" * (MOST_WORDS + 1)
    assert long_names(f"def test{short}(): ...\ndef test{long}(): ...") == [f"test{long}"]
