"""How the doctor's findings are printed: each once, and whose it is."""

import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from pardata.doctor._finding import ERROR, WARNING, Account, Finding
from pardata.ranks._table import ranks_text

_STATUS, _NAME = 9, 15  # characters of the first two columns
_WIDTH = 100  # where there is no terminal to ask


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
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    lines = []
    for begin, text in paragraphs:
        wrapper.initial_indent = wrapper.subsequent_indent = begin
        lines.append(wrapper.fill(text))
    lines[0] = finding.status.ljust(_STATUS) + finding.name.ljust(_NAME) + lines[0].lstrip()
    return lines
