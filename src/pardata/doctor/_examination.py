"""`python -m pardata env` and `check`: look, let the ranks report to rank 0, print, say how it is.

Whatever goes wrong becomes a finding, on every rank, and whatever hangs is ended in time.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import NoReturn

from pardata.collective._rank_zero import barrier
from pardata.doctor._accounts import Account
from pardata.doctor._finding import ERROR, OK, Finding, found_error, worst
from pardata.doctor._launchers import examine_launcher
from pardata.doctor._machine import examine_machine
from pardata.doctor._reach import unreachable
from pardata.doctor._report import Report, show, show_errors
from pardata.doctor._trial import rendezvous, trial, trial_error, trial_of_two
from pardata.doctor._versions import examine_versions
from pardata.launch._init import init
from pardata.ranks._launcher import Launch
from pardata.ranks._store import exchange
from pardata.ranks._world import World, channel, single_world

# What waits for the others has a timeout of its own, and says more than the end of all patience.
_MARGIN = 15.0
_LEAST = 2.0  # seconds that any step gets, however late it is
# torchrun ends all ranks as soon as one has failed: rank 0 must have printed by then.
_HEAD_START = 2.0


def examine(command: str, *, timeout: float, as_json: bool) -> int:
    """Run `command`, "env" or "check", print its report, and return the exit status.

    It is 1 where any rank found an error, on every rank. Collective where a launcher started
    several processes: rank 0 prints.
    """
    launch, findings = examine_launcher(os.environ)
    visit = _Visit(command, timeout, as_json, launch, findings)
    with visit.ended_in_time():
        return visit.alone() if launch is None or launch.size == 1 else visit.together(launch)


class _Visit:
    """One run of a command in this process."""

    def __init__(
        self,
        command: str,
        timeout: float,
        as_json: bool,  # noqa: FBT001  # called in one place, above
        launch: Launch | None,
        findings: list[Finding],
    ) -> None:
        self._command, self._as_json = command, as_json
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._launch = launch
        self._here = _before_joining(launch)
        self._findings = findings
        self._doing, self._shown = "looking at the machine", False

    def alone(self) -> int:
        """Examine a single process."""
        self._look_around()
        if self._command == "check" and self._launch is not None:
            self._doing = "the trial of two processes"
            self._findings += trial_of_two(self._timeout)
        accounts = [self._account()]
        self._show(accounts)
        return _exit_status(accounts)

    def together(self, launch: Launch) -> int:
        """Examine all processes of a launcher. Collective."""
        began = time.monotonic()
        self._doing = "joining"
        if problems := unreachable(launch, self._timeout):
            self._findings += problems
            self._look_around()
            self._give_up()
        try:
            here = init(timeout=self._left(), tune_cpu=False)
        except Exception as error:  # noqa: BLE001  # whatever goes wrong is what is looked for
            self._findings.append(trial_error("joining", error))
            self._look_around()
            self._give_up()
        self._here = here
        with here:
            if here.is_main:
                self._findings.append(rendezvous(launch, here, time.monotonic() - began))
            self._look_around()
            if self._command == "check":
                self._doing = "the trial"
                self._try(here)
            return self._report_to_rank_0(here)

    def _look_around(self) -> None:
        found = [*examine_machine(self._here), *examine_versions()]
        if self._command == "check":  # which is not about these, unless they explain a failure
            found = [finding for finding in found if finding.status != OK]
        self._findings += found

    def _try(self, here: World) -> None:
        try:
            for finding in trial(here, self._timeout):
                self._findings.append(finding)
        except Exception as error:  # noqa: BLE001  # as above
            self._findings.append(trial_error("trial", error))

    def _report_to_rank_0(self, here: World) -> int:
        self._doing = "waiting for the reports of the other ranks"
        patience = self._left()
        try:
            own = self._account().to_json()
            texts = exchange(channel(), here, f"pardata {self._command}", own, patience)
            accounts = [Account.from_json(text) for text in texts]
            if here.is_main:
                self._show(accounts)
            barrier("the report is printed", patience)
        except Exception as error:  # noqa: BLE001  # as above
            self._findings.append(trial_error("reports", error))
            self._give_up()
        return _exit_status(accounts)

    def _left(self) -> timedelta:
        return timedelta(seconds=max(_LEAST, self._deadline - time.monotonic()))

    def _give_up(self) -> NoReturn:
        """Say what this process knows, where the ranks cannot tell each other, and end it."""
        accounts = [self._account()]
        if self._shown:
            pass
        elif self._here.is_main:
            self._show(accounts)
        else:
            show_errors(Report(self._command, accounts), stream=sys.stderr)
            time.sleep(_HEAD_START)
        os._exit(1)  # leaving a group that is broken would wait for the others

    def _account(self) -> Account:
        return Account.of(self._here, self._findings)

    def _show(self, accounts: list[Account]) -> None:
        self._shown = True
        show(Report(self._command, accounts), as_json=self._as_json, stream=sys.stdout)

    @contextmanager
    def ended_in_time(self) -> Iterator[None]:
        """End the process, with a report, where the block takes much longer than it may."""
        timer = threading.Timer(self._timeout + _MARGIN, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self) -> None:
        error = TimeoutError(
            f"{self._doing} must end within {self._timeout:g} s, but has not: see whether the "
            f"other ranks have said why, or give a larger --timeout"
        )
        self._findings.append(found_error("time", error, ""))
        self._give_up()


def _before_joining(launch: Launch | None) -> World:
    """Describe this process as its launcher did: whether it will be so is not known yet."""
    here = single_world()
    if launch is None or launch.size == 1:
        return here
    return replace(
        here,
        rank=launch.rank,
        size=launch.size,
        local_rank=launch.local_rank,
        local_size=launch.local_size,
        node_rank=launch.node_rank or 0,
        num_nodes=launch.num_nodes or -(-launch.size // launch.local_size),
        launcher=launch.launcher,
    )


def _exit_status(accounts: list[Account]) -> int:
    return int(any(worst(account.findings) == ERROR for account in accounts))
