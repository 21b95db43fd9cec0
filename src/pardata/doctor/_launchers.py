"""Which launcher started this process, from which variables, and which others were there."""

from collections.abc import Mapping

from pardata.doctor._finding import Finding, found_error
from pardata.ranks._launcher import MPICH, OPEN_MPI, SLURM, TORCHRUN, Launch, detect

# Those that say something of a process: users export the rendezvous address by hand, too.
_OWN = {"torchrun": TORCHRUN[:4], "Open MPI": OPEN_MPI, "SLURM": SLURM, "MPICH": MPICH}
_CURE = "correct it, or set PARDATA_LAUNCHER=none to run as a single process"


def examine_launcher(env: Mapping[str, str]) -> tuple[Launch | None, list[Finding]]:
    """Return what a launcher told this process, `None` where that is wrong, and the findings."""
    there = {family: [name for name in names if name in env] for family, names in _OWN.items()}
    seen = {family: f"{', '.join(names)} ({family})" for family, names in there.items() if names}
    try:
        launch = detect(env)
    except ValueError as error:
        # All that is there, for somebody who must find out what is wrong with it.
        variables = [Finding("variables", "; ".join(seen.values()))] if seen else []
        return None, [found_error("launcher", error, _CURE), *variables]
    mpi = "Open MPI" if OPEN_MPI[0] in env else "MPICH"
    chosen = {"single": "", "slurm": "SLURM", "mpi": mpi}.get(launch.launcher, launch.launcher)
    ignored = [_ignored(text, chosen, env) for family, text in seen.items() if family != chosen]
    return launch, [Finding("launcher", _chosen_text(launch, chosen, env)), *ignored]


def _chosen_text(launch: Launch, chosen: str, env: Mapping[str, str]) -> str:
    choice = env.get("PARDATA_LAUNCHER", "auto")
    how = "" if choice == "auto" else f", as PARDATA_LAUNCHER={choice} says"
    if not chosen:
        return f"none{how}: a single process"
    processes = f"{launch.size} process{'es' if launch.size > 1 else ''}"
    names = TORCHRUN if chosen == "torchrun" else _OWN[chosen]
    address = f"{launch.master_addr}:{launch.master_port}"
    return f"{chosen}{how}: {processes}, to meet at {address}; from {', '.join(names)}"


def _ignored(text: str, chosen: str, env: Mapping[str, str]) -> Finding:
    if chosen or env.get("PARDATA_LAUNCHER", "auto") != "auto":
        return Finding("ignored", text)  # the line above says who was chosen, and by whom
    if "SLURM_STEP_ID" in env:
        return Finding("ignored", f"{text}: of a step of one task")
    tasks = env.get("SLURM_NTASKS", "1")
    cure = f"start the script with srun, to be the {tasks} tasks that the job asked for"
    text = f"{text}: of the shell of a job, not of a step"
    return Finding("ignored", text, cure if tasks != "1" else "")
