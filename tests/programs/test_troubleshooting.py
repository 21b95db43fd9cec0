"""The page on troubleshooting quotes messages as they are, and says of each what to do."""

import ast
import re

import pytest
from logged import log_of
from on_ranks import run
from places import DOCS, ROOT
from test_docs import blocks, run_program_on_rank

PAGE = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
SYMPTOMS = dict(re.findall(r"^### (.*)\n((?:.*\n)*?)(?=^##|\Z)", PAGE, flags=re.MULTILINE))

OF_OTHERS = (
    *("cannot import name 'init' from 'pardata'", "DataLoader worker (pid …) is killed by"),
    *("cannot reshape tensor of 0 elements", "Expected to have finished reduction in the prior"),
    "rank … waits for rank …",  # of several parts: compared with what is logged, below
)


def written():
    """Yield the texts that the sources hold, a "…" for each value that is put into them."""
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                )
                yield "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


ERRORS = (ROOT / "tests/promises/errors.md").read_text(encoding="utf-8").replace("\\", "")
SAID = "\n".join([ERRORS, *written()])


def unsaid(quote):
    """Return the parts of a quoted message, cut at each "…", that are in no message."""
    message = re.sub(r"^\w+Error: ", "", quote)
    if message.startswith(OF_OTHERS):
        return []
    return [part for part in message.split("…") if part.strip(" `") and part not in SAID]


def quotes(symptom):
    """Return what is between backticks in the quotation that a symptom begins with."""
    quotation = symptom.lstrip().partition("\n\n")[0].replace("\n> ", " ")
    assert quotation.startswith("> ")
    return [one or two for one, two in re.findall(r"``(.+?)``(?!`)|(?<!`)`([^`]+)`", quotation)]


@pytest.mark.parametrize("title", SYMPTOMS)
def test_each_symptom_quotes_its_message_with_cause_and_fix(title):
    found = quotes(SYMPTOMS[title])
    assert found
    assert [part for quote in found for part in unsaid(quote)] == []
    assert "**Cause.** " in SYMPTOMS[title]
    assert "**Fix.** " in re.sub(r"\s", " ", SYMPTOMS[title])


def test_the_page_has_20_to_27_symptoms():
    assert 20 <= len(SYMPTOMS) <= 27
    assert len(SYMPTOMS) == PAGE.count("\n### ")


def logged(file):
    with log_of("pardata.process_group._watchdog") as log:
        run_program_on_rank(file)
    return "\n".join(log.lines)


def test_the_page_begins_with_the_table_that_its_code_logs(tmp_path):
    program, shown, *_ = blocks(DOCS / "troubleshooting.md")
    file = tmp_path / "train.py"
    file.write_text(program.text)
    told, _ = run(logged, str(file), world_size=2)
    lines, wanted = (re.sub(r"\d+ s\b", "N s", text).splitlines() for text in (told, shown.text))
    assert lines[:3] == wanted  # and the stacks below


def test_a_message_that_is_said_nowhere_is_found():
    assert unsaid("ValueError: `batch_size` is wrong …") == ["`batch_size` is wrong "]
