"""Whether the process that serves the group's store can be reached at all.

torch would find out too, after a longer wait, and print the frames of its own sources.
"""

import os
import socket
import time

from pardata.doctor._finding import ERROR, Finding
from pardata.ranks._launcher import Launch

_PAUSE = 0.2  # seconds between two tries: it may still be starting
_PATIENCE = 5.0  # for one try: a firewall that drops packets says nothing


def unreachable(launch: Launch, timeout: float) -> list[Finding]:
    """Return what keeps this rank from the store, after trying for so long; nothing if it answers.

    Looks for nothing where this process will serve the store itself.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if launch.rank == 0 and not (launch.launcher == "torchrun" and agent):
        return []
    deadline = time.monotonic() + timeout
    while problem := _problem(launch, min(_PATIENCE, timeout)):
        if isinstance(problem, socket.gaierror) or time.monotonic() > deadline:
            return [_finding(launch, problem)]
        time.sleep(_PAUSE)
    return []


def _problem(launch: Launch, timeout: float) -> OSError | None:
    try:
        socket.create_connection((launch.master_addr, launch.master_port), timeout).close()
    except OSError as error:
        return error
    return None


def _finding(launch: Launch, problem: OSError) -> Finding:
    address = f"{launch.master_addr}:{launch.master_port}"
    text = f"rank {launch.rank} must reach {address}, but could not ({problem})"
    if isinstance(problem, socket.gaierror):
        cure = "set MASTER_ADDR to a name or an address of rank 0's host that every rank knows"
    elif isinstance(problem, ConnectionRefusedError):
        cure = (
            "nobody listens there: see whether rank 0 (or torchrun's agent) runs and what it says, "
            "and whether MASTER_ADDR and MASTER_PORT are its own"
        )
    else:
        cure = "open the port between the hosts, or set MASTER_ADDR to an address that is routed"
    return Finding("joining", ERROR, text, cure)
