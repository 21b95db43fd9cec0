"""What the ranks found: how bad each thing is, what to do about it, and how it is printed."""

import json
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from pardata.messages._table import ranks_text

OK, WARNING, ERROR = "ok", "warning", "error"
_STATUS, _NAME = 9, 15  # characters of the first two columns
_WIDTH = 100  # if there is no terminal to ask


class Finding(NamedTuple):
    """What was looked at, what was seen, and the cure if it is not as it should be."""

    name: str
    text: str
    cure: str = ""
    is_error: bool = False

    @property
    def status(self) -> str:
        """How bad it is."""
        return ERROR if self.is_error else WARNING if self.cure else OK


class Account(NamedTuple):
    """What a rank found, and who it is."""

    rank: int
    size: int
    host: str
    findings: list[Finding]

    @property
    def errors(self) -> list[Finding]:
        """What will not work."""
        return [finding for finding in self.findings if finding.is_error]


def found_error(name: str, error: BaseException, cure: str) -> Finding:
    """Return the finding that `error` is; `cure` is for one whose message has none.

    pardata's own messages have one form, "… must be …, but is …: do …", with the cure. Of all
    others the first line is what matters.
    """
    message = str(error).strip().split("\n\n")[0] or type(error).__name__  # then come stacks
    lines = [line for line in message.splitlines() if not line.startswith("(seen on rank")]
    must, _, told = lines[0].partition(", but ")
    if " must " in must and told:
        has_cure = ": " in told or len(lines) > 1
        return Finding(name, "\n".join(lines), "" if has_cure else cure, is_error=True)
    # torch's: where in its sources, and the frames below, help nobody here.
    text = re.sub(r"^\[[^]]*\] ", "", lines[0].partition(". This is typically")[0])
    return Finding(name, text, cure, is_error=True)


def report_text(command: str, accounts: Sequence[Account]) -> str:
    """Return the report of `command` on these ranks."""
    findings = list(_findings(accounts))
    lines = [line for finding, whose in findings for line in _lines(finding, whose)]
    statuses = Counter(finding.status for finding, _ in findings)
    bad = [(statuses[status], status) for status in (ERROR, WARNING) if statuses[status]]
    parts = [f"{number} {status}{'s' * (number > 1)}" for number, status in bad]
    first, hosts = accounts[0], list(dict.fromkeys(account.host for account in accounts))
    who = f"{first.size} ranks" if len(accounts) > 1 else f"rank {first.rank} of {first.size}"
    who = "one process" if first.size == 1 else who
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    title = f"pardata {command}: {who} on {where}"
    return "\n".join([title, "", *lines, "", " and ".join(parts) or "all is well"])


def report_json(command: str, accounts: Sequence[Account]) -> str:
    """Return the same for programs: one JSON document, with each finding of each rank."""
    ranks = [
        {**one._asdict(), "findings": [{**f._asdict(), "status": f.status} for f in one.findings]}
        for one in accounts
    ]
    return json.dumps({"command": command, "ranks": ranks}, indent=2)


def _findings(accounts: Sequence[Account]) -> Iterator[tuple[Finding, str]]:
    """Yield each finding once, those of one name together, and whose it is.

    Nobody is named for one of all ranks, or for a measure that only rank 0 took.
    """
    found: dict[str, dict[Finding, list[int]]] = {}
    for account in accounts:
        for finding in account.findings:
            found.setdefault(finding.name, {}).setdefault(finding, []).append(account.rank)
    for name, holders in found.items():
        for finding, ranks in holders.items():
            is_of_all = len(ranks) == len(accounts) or (len(holders) == 1 and not finding.cure)
            whose = "" if is_of_all else f"{ranks_text(ranks)}: "
            differ = name == "versions" and len(holders) > 1
            cure = "install the same on every host" if differ else finding.cure
            yield finding._replace(cure=cure), whose


def _lines(finding: Finding, whose: str) -> list[str]:
    indent = " " * (_STATUS + _NAME)
    paragraphs = [(indent, text) for text in (whose + finding.text).splitlines()]
    if finding.cure:
        paragraphs.append((f"{indent}  ", f"cure: {finding.cure}"))
    width = max(64, shutil.get_terminal_size((_WIDTH, 24)).columns)
    # Names of variables, hosts and files stay whole, to be copied.
    fill = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    lines = [fill(text, initial_indent=at, subsequent_indent=at) for at, text in paragraphs]
    lines[0] = finding.status.ljust(_STATUS) + finding.name.ljust(_NAME) + lines[0].lstrip()
    return lines
