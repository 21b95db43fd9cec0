"""What each rank found, put together: one table of the ranks, one line for what they share."""

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from pardata.doctor._finding import ERROR, WARNING, Finding, worst
from pardata.ranks._cores import usable_cores
from pardata.ranks._world import World


@dataclass(frozen=True)
class Account:
    """Who a rank is, and what it found."""

    rank: int
    size: int
    host: str
    node: int
    local_rank: int
    device: str
    cores: int
    pid: int
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def of(cls, here: World, findings: list[Finding]) -> "Account":
        """Describe the process that calls this."""
        device = str(here.device)
        if here.device.type == "cuda":
            device += f" {torch.cuda.get_device_name(here.device)}"
        return cls(
            here.rank,
            here.size,
            socket.gethostname(),
            here.node_rank,
            here.local_rank,
            device,
            usable_cores(here),
            os.getpid(),
            findings,
        )

    def to_json(self) -> str:
        """Return text for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Account":
        """Rebuild what `to_json` wrote."""
        facts = json.loads(text)
        facts["findings"] = [Finding(**finding) for finding in facts["findings"]]
        return cls(**facts)


@dataclass(frozen=True)
class Shared:
    """A finding, and the ranks that made it."""

    finding: Finding
    ranks: list[int]


def merged(accounts: Sequence[Account]) -> list[Shared]:
    """Return the findings of all ranks, each once, in the order in which they were made."""
    holders: dict[Finding, list[int]] = {}
    for account in accounts:
        for finding in account.findings:
            holders.setdefault(finding, []).append(account.rank)
    names = list(dict.fromkeys(finding.name for finding in holders))
    found = [Shared(*item) for name in names for item in holders.items() if item[0].name == name]
    return [_same_everywhere(shared, found) for shared in found]


def _same_everywhere(shared: Shared, found: list[Shared]) -> Shared:
    """Turn versions that differ between ranks into warnings: nobody tests such mixtures."""
    versions = [other for other in found if other.finding.name == shared.finding.name == "versions"]
    if len(versions) < 2:
        return shared
    cure = "install the same on every host"
    return replace(shared, finding=replace(shared.finding, status=WARNING, cure=cure))


def status_of(found: Sequence[Shared]) -> str:
    """Return the gravest status of all."""
    return worst(shared.finding for shared in found)


def counts_text(found: Sequence[Shared]) -> str:
    """Say how many errors and warnings there are."""
    parts = []
    for status in (ERROR, WARNING):
        number = sum(shared.finding.status == status for shared in found)
        if number:
            parts.append(f"{number} {status}{'s' if number > 1 else ''}")
    return " and ".join(parts) if parts else "all is well"
