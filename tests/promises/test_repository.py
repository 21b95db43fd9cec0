"""What a forge reads of the repository: workflows that nobody can exchange."""

import re

from places import ROOT

FORGE = ROOT / ".github"
WORKFLOWS = sorted(FORGE.glob("workflows/*.yml"))


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
