"""How the doctor's findings are printed: a table of the ranks, then each finding once."""

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
    table = [*_table(accounts), ""] if len(accounts) > 1 else []
    findings = list(_findings(accounts))
    lines = [line for finding, whose in findings for line in _lines(finding, whose)]
    statuses = Counter(finding.status for finding, _ in findings)
    bad = [(statuses[status], status) for status in (ERROR, WARNING) if statuses[status]]
    parts = [f"{number} {status}{'s' * (number > 1)}" for number, status in bad]
    title = f"pardata {command}: {_scope(accounts)}"
    return "\n".join([title, "", *table, *lines, "", " and ".join(parts) or "all is well"])


def _scope(accounts: Sequence[Account]) -> str:
    first = accounts[0]
    if first.size == 1:
        return f"one process on {first.host}"
    if len(accounts) < first.size:
        return f"rank {first.rank} of {first.size} on {first.host}"
    hosts = {account.host for account in accounts}
    return f"{first.size} ranks on {first.host if len(hosts) == 1 else f'{len(hosts)} hosts'}"


def _table(accounts: Sequence[Account]) -> list[str]:
    names = [name.replace("_", " ") for name in Account._fields]
    rows = [list(map(str, row[2:])) for row in (names, *accounts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


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
    front = finding.status.ljust(_STATUS) + finding.name.ljust(_NAME)
    lines = _wrapped(whose + finding.text, _STATUS + _NAME)
    lines[0] = front + lines[0].lstrip()
    if finding.cure:
        lines += _wrapped(f"cure: {finding.cure}", _STATUS + _NAME + 2)
    return lines


def _wrapped(text: str, indent: int) -> list[str]:
    room = max(40, shutil.get_terminal_size((_WIDTH, 24)).columns - indent)
    # Names of variables, hosts and files stay whole, to be copied.
    return [
        " " * indent + part
        for line in text.splitlines()
        for part in textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False)
    ]
