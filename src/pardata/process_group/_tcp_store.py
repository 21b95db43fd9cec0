"""Opens the TCPStore of a run, and checks that it belongs to that run.

Does not distinguish two runs that no launcher has named.
"""

import os
import socket
from datetime import timedelta

import torch.distributed as dist

from pardata.environment._launchers import Env, LaunchInfo
from pardata.store._client import set_once, wait_for
from pardata.store._round import missing_ranks_text

_RUN = "pardata/run"  # the key of the run's name in the store

# The stores of this process by launch id, and whether it serves them. They stay open: a rank that
# joins again must not find a store that is closing.
_opened = dict[str, tuple[dist.Store, bool]]()


def open_store(launch: LaunchInfo, timeout: timedelta) -> tuple[dist.Store, bool]:
    """Return the store of this run, opened once, and whether this process serves it."""
    if launch.launch_id in _opened:
        store, hosts = _opened[launch.launch_id]
        return store.clone(), hosts  # an unfinished request may hold the lock of the connection
    opened = _connect(launch, timeout) if launch.master_addr else (dist.HashStore(), True)
    _check_run(opened[0], launch, timeout)  # before it is kept, so that a second try checks again
    _opened[launch.launch_id] = opened
    return opened


def _connect(launch: LaunchInfo, timeout: timedelta) -> tuple[dist.Store, bool]:
    """Return the store at the launcher's address, and whether this process serves it.

    Raises:
        RuntimeError: the address does not resolve, its port is taken, or nobody listens.
    """
    address = launch.master_addr, launch.master_port
    try:
        # torch retries an unknown name for minutes.
        socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except OSError as error:
        msg = f"`MASTER_ADDR` must be a host that resolves, but {launch.master_addr!r} does not "
        msg += f"({error}): set MASTER_ADDR to an address that every rank can reach"
        raise RuntimeError(msg) from error
    # Under torchrun the agent serves the store at that address, and every rank is a client.
    served = launch.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    hosts = launch.rank == 0 and served != str(True)
    try:
        # A group that the user creates later at this address shares the store. `with_fresh_prefix`
        # waits for the other ranks, because its error names the missing ones.
        store = dist.TCPStore(
            *address, launch.size, hosts, timeout, wait_for_workers=False, multi_tenant=True
        )
    except (RuntimeError, OSError) as error:
        if "EADDRINUSE" not in str(error):
            raise  # the error names the address
        raise RuntimeError(
            f"the port of `MASTER_PORT` must be free, but {launch.endpoint} is in use: set another"
        ) from error
    return store, hosts


def _check_run(store: dist.Store, launch: LaunchInfo, timeout: timedelta) -> None:
    """Write the name of this run to the store on rank 0; raise if the store has another name."""
    ours = run_name(launch, os.environ)
    if launch.rank == 0:
        theirs = set_once(store, _RUN, ours)
    else:
        theirs = get_from_rank_zero(store, _RUN, launch.size, timeout)
    if theirs != ours:
        msg = f"{launch.endpoint} is the store of {theirs}, not {ours}: set a free MASTER_PORT"
        raise RuntimeError(msg)


def get_from_rank_zero(store: dist.Store, key: str, size: int, timeout: timedelta) -> str:
    """Return the text that rank 0 writes; raise an error that names it if it does not come."""
    if not wait_for(store, [key], timeout):
        who = missing_ranks_text([0], size, f" within {timeout}")
        raise TimeoutError(f"`init` must be reached by every rank, but {who}")
    return store.get(key).decode()


def run_name(launch: LaunchInfo, env: Env) -> str:
    """Return the launcher's name of this run, the same on all of its ranks."""
    if launch.launcher == "slurm":
        job, step = env.get("SLURM_JOB_ID"), env.get("SLURM_STEP_ID")
        return f"SLURM job {job}, step {step}, start {env.get('SLURM_RESTART_COUNT', '0')}"
    if env.get("TORCHELASTIC_RUN_ID", "none") != "none":
        return f"torchrun's run {env['TORCHELASTIC_RUN_ID']}"
    if launch.launcher == "mpi" and "PMIX_NAMESPACE" in env:
        return f"Open MPI's run {env['PMIX_NAMESPACE']}"
    return "a run that its launcher has not named"
