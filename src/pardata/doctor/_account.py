"""Who a rank is and what it found, as it travels to rank 0."""

import json
import socket
from dataclasses import asdict, dataclass

import torch

from pardata.doctor._finding import ERROR, Finding
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
    findings: list[Finding]

    @classmethod
    def of(cls, here: World, findings: list[Finding]) -> "Account":
        """Describe the process that calls this."""
        device = str(here.device)
        if here.device.type == "cuda":
            device += f" {torch.cuda.get_device_name(here.device)}"
        ids = (here.rank, here.size, socket.gethostname(), here.node_rank, here.local_rank)
        return cls(*ids, device, usable_cores(here), findings)

    @property
    def errors(self) -> list[Finding]:
        """What will not work."""
        return [finding for finding in self.findings if finding.status == ERROR]

    def to_json(self) -> str:
        """Return text for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Account":
        """Rebuild what `to_json` wrote."""
        facts = json.loads(text)
        findings = [Finding(**finding) for finding in facts.pop("findings")]
        return cls(**facts, findings=findings)
