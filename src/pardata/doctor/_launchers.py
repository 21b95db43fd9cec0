"""Which launcher started this process, from which variables, and which others were there."""

from collections.abc import Mapping

from pardata.doctor._finding import OK, WARNING, Finding, found_error
from pardata.ranks._launcher import MPICH, OPEN_MPI, SLURM, TORCHRUN, Launch, detect

# Those that say something of a process: users export the rendezvous address by hand, too.
_OWN = {"torchrun": TORCHRUN[:4], "Open MPI": OPEN_MPI, "SLURM": SLURM, "MPICH": MPICH}
_USED = {**_OWN, "torchrun": TORCHRUN}
_CURE = "correct it, or set PARDATA_LAUNCHER=none to run as a single process"


def examine_launcher(env: Mapping[str, str]) -> tuple[Launch | None, list[Finding]]:
    """Return what a launcher told this process, `None` where that is wrong, and the findings."""
    there = {
        family: [name for name in names if name in env]
        for family, names in _OWN.items()
        if any(name in env for name in names)
    }
    try:
        launch = detect(env)
    except ValueError as error:
        return None, [found_error("launcher", error, _CURE), *_seen(there)]
    chosen = _family(launch, env)
    findings = [Finding("launcher", OK, _chosen_text(launch, chosen, env))]
    others = {family: names for family, names in there.items() if family != chosen}
    findings += [_ignored(family, names, chosen, env) for family, names in others.items()]
    return launch, findings


def _family(launch: Launch, env: Mapping[str, str]) -> str:
    mpi = "Open MPI" if OPEN_MPI[0] in env else "MPICH"
    return {"single": "", "slurm": "SLURM", "mpi": mpi}.get(launch.launcher, launch.launcher)


def _chosen_text(launch: Launch, chosen: str, env: Mapping[str, str]) -> str:
    choice = env.get("PARDATA_LAUNCHER", "auto")
    how = "" if choice == "auto" else f", as PARDATA_LAUNCHER={choice} says"
    if not chosen:
        return f"none{how}: a single process"
    processes = f"{launch.size} process{'es' if launch.size > 1 else ''}"
    return (
        f"{chosen}{how}: {processes}, to meet at {launch.master_addr}:{launch.master_port}; "
        f"from {', '.join(_USED[chosen])}"
    )


def _seen(there: Mapping[str, list[str]]) -> list[Finding]:
    """List all that is there, for somebody who must find out what is wrong with it."""
    parts = [f"{', '.join(names)} ({family})" for family, names in there.items()]
    return [Finding("variables", OK, "; ".join(parts))] if parts else []


def _ignored(family: str, names: list[str], chosen: str, env: Mapping[str, str]) -> Finding:
    shown = f"{', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)} ({family})"
    choice = env.get("PARDATA_LAUNCHER", "auto")
    if choice != "auto":
        return Finding("ignored", OK, f"{shown}: PARDATA_LAUNCHER={choice} decides")
    if chosen:
        return Finding("ignored", OK, f"{shown}: {chosen} goes first")
    if "SLURM_STEP_ID" in env:
        return Finding("ignored", OK, f"{shown}: of a step of one task")
    shell = f"{shown}: of the shell of a job, not of a step"
    tasks = env.get("SLURM_NTASKS", "1")
    if tasks == "1":
        return Finding("ignored", OK, shell)
    cure = f"start the script with srun, to be the {tasks} tasks that the job asked for"
    return Finding("ignored", WARNING, shell, cure)
