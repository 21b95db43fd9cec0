"""`python -m pardata env` and `check`: look, let the ranks report to rank 0, print, say how it is.

Whatever goes wrong becomes a finding, on every rank.
"""

import os
import socket
import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

from pardata.doctor._finding import Account, Finding, found_error
from pardata.doctor._launchers import examine_launcher
from pardata.doctor._report import report_text
from pardata.doctor._surroundings import place, surroundings
from pardata.doctor._trial import NETWORK_CURE, trial, trial_of_two
from pardata.launch._init import init
from pardata.ranks._launcher import SINGLE, Launch
from pardata.ranks._turn import all_say
from pardata.ranks._world import World, channel, single_world

_LEAST = 2.0  # seconds that any step gets, however late it is
# torchrun ends all ranks as soon as one has failed: rank 0 must have printed by then.
_HEAD_START = 2.0


def examine(command: str, *, timeout: float) -> int:
    """Run `command`, "env" or "check", print its report, and return the exit status.

    It is 1 where any rank found an error, on every rank. Collective where a launcher started
    several processes: rank 0 prints.
    """
    launch, findings = examine_launcher(os.environ)
    here = _before_joining(launch or SINGLE)
    # A check shows only what may explain a failure.
    findings += [found for found in surroundings(here) if command == "env" or found.cure]
    if here.size > 1:
        accounts = _examine_together(command, here, findings, timeout)
    else:
        if command == "check" and launch is not None:
            findings += trial_of_two(timeout)
        accounts = [_account(here, findings)]
        print(report_text(command, accounts), flush=True)
    return int(any(account.errors for account in accounts))


def _before_joining(launch: Launch) -> World:
    """Describe this process as its launcher did: whether it will be so is not known yet."""
    names = ("rank", "size", "local_rank", "local_size", "launcher")
    told = {name: getattr(launch, name) for name in names}
    num_nodes = launch.num_nodes or -(-launch.size // launch.local_size)
    return replace(single_world(), **told, num_nodes=num_nodes)


def _examine_together(
    command: str, here: World, findings: list[Finding], timeout: float
) -> list[Account]:
    """Return what each process of a launcher found. Collective: rank 0 prints it."""
    began, doing = time.monotonic(), "joining"

    def left() -> timedelta:
        return timedelta(seconds=max(_LEAST, began + timeout - time.monotonic()))

    try:
        with init(timeout=left(), tune_cpu=False) as joined:
            if joined.is_main:
                text = f"{joined.size} ranks met in {time.monotonic() - began:.1f} s"
                findings.append(Finding(doing, f"{text}, backend {joined.backend}"))
            findings.append(place(joined))
            if command == "check":
                findings += trial(joined, left().total_seconds())
            doing = "reports"
            return _reported(command, joined, findings, left())
    except Exception as error:  # noqa: BLE001  # whatever goes wrong is what is looked for
        findings.append(found_error(doing, error, NETWORK_CURE))
        _end_alone(command, _account(here, findings))


def _reported(
    command: str, here: World, findings: list[Finding], patience: timedelta
) -> list[Account]:
    """Let rank 0 print what all ranks found, and return it when it has. Collective."""
    own = _account(here, findings)
    told = all_say(channel(), f"pardata {command}", lambda: own, list, timeout=patience)
    # JSON has made lists of them.
    accounts = [
        Account(rank, size, host, [Finding(*each) for each in found])
        for rank, size, host, found in told
    ]
    if here.is_main:
        print(report_text(command, accounts), flush=True)
    all_say(channel(), "the report is printed", lambda: None, len, timeout=patience)
    return accounts


def _account(here: World, findings: list[Finding]) -> Account:
    return Account(here.rank, here.size, socket.gethostname(), findings)


def _end_alone(command: str, account: Account) -> NoReturn:
    """Say what this process knows, where the ranks cannot tell each other, and end it."""
    if account.rank == 0:
        print(report_text(command, [account]), flush=True)
    else:
        who = f"pardata {command}, rank {account.rank} on {account.host}"
        lines = [f"{who}: {found.name}: {found.text}: {found.cure}" for found in account.errors]
        print(*lines, sep="\n", file=sys.stderr, flush=True)
        time.sleep(_HEAD_START)
    os._exit(1)  # leaving a group that is broken would wait for the others
