"""How the doctor's findings are printed: for people, or as JSON."""

import json
import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

from pardata.doctor._accounts import Account, Shared, counts_text, merged, status_of
from pardata.ranks._table import ranks_text

_COLOURS = {"ok": "32", "warning": "33", "error": "31"}
_STATUS, _NAME = 9, 15  # characters of the first two columns
_WIDTH = 100  # where there is no terminal to ask
_COLUMNS = ("rank", "host", "node", "local_rank", "device", "cores", "pid")


@dataclass(frozen=True)
class Report:
    """What `command` found on these ranks."""

    command: str
    accounts: Sequence[Account]

    @property
    def found(self) -> list[Shared]:
        """The findings, each once."""
        return merged(self.accounts)

    @property
    def status(self) -> str:
        """The gravest status."""
        return status_of(self.found)

    def as_json(self) -> str:
        """Return the report for machines."""
        document = {
            "command": self.command,
            "status": self.status,
            "world_size": self.accounts[0].size,
            "ranks": [{name: vars(a)[name] for name in _COLUMNS} for a in self.accounts],
            "findings": [_facts(shared) for shared in self.found],
        }
        return json.dumps(document, indent=2)

    def as_text(self, *, coloured: bool, width: int) -> str:
        """Return the report for people."""
        found = self.found
        parts = [self._title()]
        if len(self.accounts) > 1:
            parts += ["", *_table(self.accounts)]
        parts.append("")
        for shared in found:
            parts += _lines(shared, self._whose(shared, found), width, coloured=coloured)
        return "\n".join([*parts, "", counts_text(found)])

    def _title(self) -> str:
        hosts = list(dict.fromkeys(account.host for account in self.accounts))
        first = self.accounts[0]
        if first.size == 1:
            return f"pardata {self.command}: one process on {first.host}"
        if len(self.accounts) < first.size:
            return f"pardata {self.command}: rank {first.rank} of {first.size} on {first.host}"
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
        return f"pardata {self.command}: {len(self.accounts)} ranks on {where}"

    def _whose(self, shared: Shared, found: list[Shared]) -> str:
        """Name the ranks of a finding where another one of that name is not theirs."""
        alike = [other for other in found if other.finding.name == shared.finding.name]
        everyone = len(shared.ranks) == len(self.accounts)
        if everyone or (len(alike) == 1 and shared.finding.status == "ok"):
            return ""
        return f"{ranks_text(shared.ranks)}: "


def _facts(shared: Shared) -> dict[str, object]:
    facts = {**asdict(shared.finding), "ranks": shared.ranks}
    return {name: value for name, value in facts.items() if value is not None}


def _table(accounts: Sequence[Account]) -> list[str]:
    columns = _COLUMNS[:-1]  # not the pid, which is for machines
    rows = [[str(vars(account)[name]) for name in columns] for account in accounts]
    table = [[name.replace("_", " ") for name in columns], *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    text = {"host", "device"}
    return [
        "  ".join(
            cell.ljust(width) if name in text else cell.rjust(width)
            for cell, width, name in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in table
    ]


def _lines(shared: Shared, whose: str, width: int, *, coloured: bool) -> list[str]:
    finding = shared.finding
    status = finding.status.ljust(_STATUS)
    if coloured:
        status = f"\033[{_COLOURS[finding.status]}m{status}\033[0m"
    indent = " " * (_STATUS + _NAME)
    room = max(40, width - len(indent))
    lines = _wrapped(whose + finding.text, room)
    if finding.cure:
        lines += [f"  {line}" for line in _wrapped(f"cure: {finding.cure}", room - 2)]
    first = f"{status}{finding.name.ljust(_NAME)}{lines[0]}"
    return [first, *(indent + line for line in lines[1:])]


def _wrapped(text: str, width: int) -> list[str]:
    # Names of variables, hosts and files stay whole, to be copied.
    return [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)
    ]


def show(report: Report, *, as_json: bool, stream: TextIO) -> None:
    """Print `report` in one piece: lines of several ranks could mix."""
    if as_json:
        text = report.as_json()
    else:
        terminal = stream.isatty()
        width = shutil.get_terminal_size((_WIDTH, 24)).columns if terminal else _WIDTH
        text = report.as_text(coloured=terminal and wants_colour(os.environ), width=width)
    _write(text + "\n", stream)


def show_errors(report: Report, *, stream: TextIO) -> None:
    """Print only what went wrong, each line with its rank and host."""
    account = report.accounts[0]
    who = f"pardata {report.command}, rank {account.rank} on {account.host}"
    errors = [shared.finding for shared in report.found if shared.finding.status == "error"]
    _write("".join(f"{who}: {f.name}: {f.text}: {f.cure}\n" for f in errors), stream)


def wants_colour(env: Mapping[str, str]) -> bool:
    """Return whether a terminal shall show colours (see https://no-color.org)."""
    return not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def _write(text: str, stream: TextIO) -> None:
    encoding = stream.encoding or "utf-8"
    try:
        # A terminal of a bare "C" locale takes no other letters, as those of an error message.
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()
    except BrokenPipeError:  # as in `… | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
