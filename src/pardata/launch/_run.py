"""Whose run this is: what two runs that meet at one address can be told apart by."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pardata.ranks._launcher import Launch


def run_of(launch: Launch, env: Mapping[str, str]) -> str:
    """Return the name of the run that `launch` belongs to, the same on all of its ranks."""
    if launch.launcher == "slurm":
        restarts = env.get("SLURM_RESTART_COUNT", "0")
        job, step = env.get("SLURM_JOB_ID"), env.get("SLURM_STEP_ID")
        return f"SLURM job {job}, step {step}, start {restarts}"
    if launch.launcher == "torchrun" and env.get("TORCHELASTIC_RUN_ID", "none") != "none":
        return f"torchrun's run {env['TORCHELASTIC_RUN_ID']}"
    if launch.launcher == "mpi" and "PMIX_NAMESPACE" in env:
        return f"Open MPI's run {env['PMIX_NAMESPACE']}"
    if launch.launcher == "mpi" and launch.local_size == launch.size and (proxy := _hydra()):
        return f"MPICH's run under process {proxy}"
    # No more than the script's name is the same on all ranks, of whatever host and launcher.
    return f"a run of {Path(sys.argv[0]).name}"


def _hydra() -> int:
    """Return the process by which MPICH started this one and its neighbours; 0 if it is unseen.

    MPICH gives a run no name.
    """
    pid = "self"
    with suppress(OSError, ValueError):  # no Linux, or not allowed to look
        while pid != "0":
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            if "(hydra_" in name:
                return int(name.split()[0])
            pid = rest.split()[1]
    return 0
