"""The store at the address where the ranks of a run meet, and whose run it belongs to."""

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from pardata.environment._launchers import Launch
from pardata.store._client import came
from pardata.store._verdict import who_did_not_come

_RUN = "pardata/run"  # the key of the name of the run that a store belongs to

# The stores that this process opened, by the run, with whether it serves them. Kept to its end: a
# rank that joins again at once must not meet a store that is just closing.
_opened_stores: dict[str, tuple[dist.Store, bool]] = {}


def store_of(launch: Launch, timeout: timedelta) -> tuple[dist.Store, bool]:
    """Return the store of this run, opened once, and whether it lives here."""
    if launch.identity not in _opened_stores:
        opened = _opened(launch, timeout)
        _require_own(opened[0], launch, timeout)  # before it is kept: a second try looks again
        _opened_stores[launch.identity] = opened
    return _opened_stores[launch.identity]


def _opened(launch: Launch, timeout: timedelta) -> tuple[dist.Store, bool]:
    """Return the store at the address that the launcher named, and whether it lives here.

    Raises:
        RuntimeError: if the address does not resolve, its port is taken, or nobody listens.
    """
    if not launch.master_addr:
        return dist.HashStore(), True
    address = launch.master_addr, launch.master_port
    where = f"{launch.master_addr}:{launch.master_port}"
    try:
        # torch retries an unknown name for minutes.
        socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RuntimeError(
            f"`MASTER_ADDR` must be a host that resolves, but {launch.master_addr!r} does not "
            f"({error}): set MASTER_ADDR to an address that every rank can reach"
        ) from error
    # Under torchrun the agent serves the store at that address, and every rank is a client.
    served = launch.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    hosts = launch.rank == 0 and served != str(True)
    try:
        if not hosts:
            _wait_for(address, timeout)
        # A group that the user makes later at this address shares the store. `with_fresh_part`
        # waits for the others, and can name who is missing.
        store = dist.TCPStore(
            *address, launch.size, hosts, timeout, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, OSError) as error:
        if "EADDRINUSE" in str(error):
            raise RuntimeError(
                f"the port of `MASTER_PORT` must be free, but {where} is in use: another run "
                f"is on this host; set MASTER_PORT to a free port"
            ) from error
        raise RuntimeError(
            f"rank {launch.rank} must reach rank 0 at {where}, but could not within "
            f"{timeout}: is rank 0 running, and is the port open between the hosts?"
        ) from error
    return store, hosts


def _wait_for(address: tuple[str, int], timeout: timedelta) -> None:
    """Wait until rank 0 listens: torch may try for twice its timeout, and prints where in C++."""
    deadline = time.monotonic() + timeout.total_seconds()
    while (left := deadline - time.monotonic()) > 0:
        with suppress(OSError):
            socket.create_connection(address, max(0.1, left)).close()
            return
        time.sleep(0.1)
    raise TimeoutError


def _require_own(store: dist.Store, launch: Launch, timeout: timedelta) -> None:
    """Leave the name of this run on the store as rank 0; refuse a store that is another run's."""
    ours = run_of(launch, os.environ)
    if launch.rank == 0:
        theirs = store.compare_set(_RUN, "", ours).decode()
        store.set(_RUN, theirs)  # wakes who waits, which the line above does not everywhere
    elif came(store, [_RUN], timeout):
        theirs = store.get(_RUN).decode()
    else:
        raise not_met([0], launch.size, timeout)
    if theirs != ours:
        raise RuntimeError(
            f"all ranks that meet at {launch.master_addr}:{launch.master_port} must be of one run, "
            f"but the store there is that of {theirs}, and this rank is of {ours}: end the other "
            f"run, or give this one a port of its own by MASTER_PORT"
        )


def not_met(missing: list[int], size: int, timeout: timedelta) -> TimeoutError:
    """Return the error that names ranks which did not come."""
    who = who_did_not_come(missing, size, f" within {timeout}")
    return TimeoutError(f"`init` must be reached by every rank, but {who}")


def run_of(launch: Launch, env: Mapping[str, str]) -> str:
    """Return the name that the launcher of a run has given it, the same on all of its ranks."""
    if launch.launcher == "slurm":
        restarts = env.get("SLURM_RESTART_COUNT", "0")
        job, step = env.get("SLURM_JOB_ID"), env.get("SLURM_STEP_ID")
        return f"SLURM job {job}, step {step}, start {restarts}"
    if env.get("TORCHELASTIC_RUN_ID", "none") != "none":
        return f"torchrun's run {env['TORCHELASTIC_RUN_ID']}"
    if launch.launcher == "mpi" and "PMIX_NAMESPACE" in env:
        return f"Open MPI's run {env['PMIX_NAMESPACE']}"
    return "a run that its launcher has not named"
