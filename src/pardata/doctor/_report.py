"""How the doctor's findings are printed: a table of the ranks, then each finding once."""

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from pardata.doctor._account import Account
from pardata.doctor._finding import ERROR, OK, WARNING, Finding
from pardata.ranks._table import ranks_text

_STATUS, _NAME = 9, 15  # characters of the first two columns
_WIDTH = 100  # where there is no terminal to ask


def report_text(command: str, accounts: Sequence[Account]) -> str:
    """Return the report of `command` on these ranks."""
    table = [*_table(accounts), ""] if len(accounts) > 1 else []
    holders = _holders(accounts)
    findings = [
        line
        for finding, ranks in holders.items()
        for line in _lines(finding, _whose(finding, ranks, holders, len(accounts)))
    ]
    title = f"pardata {command}: {_scope(accounts)}"
    return "\n".join([title, "", *table, *findings, "", _count(holders)])


def errors_text(command: str, account: Account) -> str:
    """Return what went wrong on one rank, each error in one line that names the rank."""
    who = f"pardata {command}, rank {account.rank} on {account.host}"
    return "\n".join(f"{who}: {f.name}: {f.text}: {f.cure}" for f in account.errors)


def _scope(accounts: Sequence[Account]) -> str:
    first = accounts[0]
    if first.size == 1:
        return f"one process on {first.host}"
    if len(accounts) < first.size:
        return f"rank {first.rank} of {first.size} on {first.host}"
    hosts = {account.host for account in accounts}
    return f"{first.size} ranks on {first.host if len(hosts) == 1 else f'{len(hosts)} hosts'}"


def _table(accounts: Sequence[Account]) -> list[str]:
    rows: list[tuple[object, ...]] = [("rank", "host", "node", "local rank", "device", "cores")]
    rows += [(a.rank, a.host, a.node, a.local_rank, a.device, a.cores) for a in accounts]
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _holders(accounts: Sequence[Account]) -> dict[Finding, list[int]]:
    """Return each finding with the ranks that made it, those of one name together."""
    made = [(finding, account.rank) for account in accounts for finding in account.findings]
    names = list(dict.fromkeys(finding.name for finding, _ in made))
    mixed = len({finding for finding, _ in made if finding.name == "versions"}) > 1
    holders: dict[Finding, list[int]] = {}
    for finding, rank in sorted(made, key=lambda pair: names.index(pair[0].name)):
        if mixed and finding.name == "versions":
            cure = "install the same on every host"
            finding = replace(finding, status=WARNING, cure=cure)  # noqa: PLW2901  # as it counts
        holders.setdefault(finding, []).append(rank)
    return holders


def _whose(finding: Finding, ranks: list[int], holders: dict[Finding, list[int]], size: int) -> str:
    """Name the ranks of a finding, unless it is of all, or a measure that only rank 0 took."""
    only_one = sum(other.name == finding.name for other in holders) == 1
    if len(ranks) == size or (only_one and finding.status == OK):
        return ""
    return f"{ranks_text(ranks)}: "


def _lines(finding: Finding, whose: str) -> list[str]:
    indent = " " * (_STATUS + _NAME)
    room = max(40, shutil.get_terminal_size((_WIDTH, 24)).columns - len(indent))
    lines = _wrapped(whose + finding.text, room)
    if finding.cure:
        lines += [f"  {line}" for line in _wrapped(f"cure: {finding.cure}", room - 2)]
    first = f"{finding.status.ljust(_STATUS)}{finding.name.ljust(_NAME)}{lines[0]}"
    return [first, *(indent + line for line in lines[1:])]


def _wrapped(text: str, width: int) -> list[str]:
    # Names of variables, hosts and files stay whole, to be copied.
    return [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
    ]


def _count(holders: dict[Finding, list[int]]) -> str:
    """Say how many errors and warnings there are."""
    statuses = [finding.status for finding in holders]
    numbers = [(statuses.count(status), status) for status in (ERROR, WARNING)]
    parts = [f"{number} {status}{'s' * (number > 1)}" for number, status in numbers if number]
    return " and ".join(parts) or "all is well"
