"""What a forge reads of the repository: workflows that nobody can exchange, forms that it takes."""

import re

import pytest
from places import ROOT

yaml = pytest.importorskip("yaml")
FORGE = ROOT / ".github"
WORKFLOWS = sorted(FORGE.glob("workflows/*.yml"))
FORMS = [file for file in sorted(FORGE.glob("ISSUE_TEMPLATE/*.yml")) if file.stem != "config"]
# What GitHub's form schema asks of each kind of element.
ASKED = {
    "markdown": {"value"},
    "textarea": {"label"},
    "input": {"label"},
    "dropdown": {"label", "options"},
}


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


def test_an_action_has_one_version_everywhere():
    used = {line for file in WORKFLOWS for line in re.findall(r"uses: (\w.*)", file.read_text())}
    assert len({line.partition("@")[0] for line in used}) == len(used) == 5


@pytest.mark.parametrize("file", FORMS, ids=[file.stem for file in FORMS])
def test_a_form_is_one_that_github_takes(file):
    form = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    names = [element["id"] for element in form["body"] if element["type"] != "markdown"]
    assert len(set(names)) == len(names) > 0
    for element in form["body"]:
        assert ASKED[element["type"]] <= element["attributes"].keys()
        assert all(isinstance(option, str) for option in element["attributes"].get("options", []))


def test_there_are_forms_for_both_and_dependabot_watches_the_actions():
    assert [file.stem for file in FORMS] == ["bug", "wish"]
    (update,) = yaml.safe_load((FORGE / "dependabot.yml").read_text())["updates"]
    assert update["package-ecosystem"] == "github-actions"


def test_the_commands_of_the_template_are_those_of_ci():
    script = (ROOT / ".ci" / "run").read_text()
    template = (FORGE / "pull_request_template.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"`(ruff check .*?)`", template)
    assert all(
        re.search(rf"^ *{re.escape(part)}$", script, re.MULTILINE)
        for part in commands.split(" && ")
    )
