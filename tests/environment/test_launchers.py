"""Which launcher started this process, from its variables alone."""

import itertools
import re

import pytest
from variables import (
    AS_MPICH,
    AS_SLURM,
    AS_TORCHRUN,
    DAEMON,
    MPICH,
    OPEN_MPI,
    RAY,
    SALLOC,
    SBATCH,
    SRUN,
    TORCHRUN,
)

from pardata.environment._launchers import LAUNCHERS, SINGLE, Launcher, LaunchInfo, detect_launch
from pardata.testing._run import _environment


def refused(env, *fragments):
    """Show that `env` is refused with a message that says all of this."""
    before = dict(env)
    with pytest.raises(ValueError, match=re.escape(fragments[0])) as caught:
        detect_launch(env)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert env == before


AS_OPEN_MPI = LaunchInfo("mpi", 1, 2, 1, 2, None, None, "127.0.0.1", 19738)
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "5"}  # of srun --mpi=pmi2, beside its own
UNEVEN = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}
BY_HAND = {"MASTER_ADDR": "h7", "MASTER_PORT": "1234"}
CHOICE = "PARDATA_LAUNCHER"


OF_RANK = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
AS_HOROVOD = AS_MPICH._replace(launcher="horovod")
OF_FLUX = {
    "FLUX_TASK_RANK": "1",
    "FLUX_JOB_SIZE": "2",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "1",
}
OF_SUBMITIT = {
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_LOCALID": "1",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
}


RECOGNIZED = [
    ({}, SINGLE),
    (TORCHRUN, AS_TORCHRUN),
    (RAY, LaunchInfo("torchrun", 1, 2, 1, 2, None, None, "192.0.2.2", 41231)),
    (SRUN, AS_SLURM),
    (MPICH, AS_MPICH),
    (OPEN_MPI, AS_OPEN_MPI),
    (SBATCH, SINGLE),
    (SALLOC, SINGLE),
    (SBATCH | {"SLURM_STEP_ID": "batch"}, SINGLE),
    # An interactive step has a number, and one task.
    (SALLOC | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, SINGLE),
    # Launchers that set rank, size, local rank and local size under names of their own.
    *(
        ({f"{prefix}_{name}": value for name, value in OF_RANK.items()}, AS_MPICH)
        for prefix in ("MV2_COMM_WORLD", "JSM_NAMESPACE")
    ),
    ({f"HOROVOD_{name}": value for name, value in OF_RANK.items()}, AS_HOROVOD),
    (OF_FLUX, AS_HOROVOD._replace(launcher="flux")),
    (OF_FLUX | PMI2 | {"PMI_RANK": "1"}, AS_HOROVOD._replace(launcher="flux")),
    (
        OF_FLUX | {"FLUX_JOB_SIZE": "5", "FLUX_JOB_NNODES": "2", "MASTER_ADDR": "h1"},
        AS_HOROVOD._replace(launcher="flux", size=5, local_size=3, master_addr="h1"),
    ),
    (OF_SUBMITIT, AS_HOROVOD._replace(launcher="submitit")),
    (OF_SUBMITIT | SBATCH, AS_HOROVOD._replace(launcher="submitit")),
    (
        {"PALS_RANKID": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}
        | {"PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
        AS_MPICH,
    ),
    # Exported by hand for the job's own use; it makes nobody a rank.
    ({"MASTER_ADDR": "h1", "MASTER_PORT": "29500"}, SINGLE),
    (SRUN | PMI2, AS_SLURM),
    (SRUN | PMI2 | {"SLURM_STEP_NUM_TASKS": "1"}, SINGLE),
    # The order of precedence: torchrun, Open MPI, SLURM, MPICH.
    (MPICH | DAEMON | OPEN_MPI | TORCHRUN, AS_TORCHRUN),
    # Open MPI's own variables, not those of its daemon in the allocation.
    (MPICH | DAEMON | OPEN_MPI, AS_OPEN_MPI),
    (MPICH | SRUN, AS_SLURM),
    # What is chosen goes before all.
    (TORCHRUN | SRUN | {CHOICE: "torchrun"}, AS_TORCHRUN),
    (SRUN | {CHOICE: "slurm", "RANK": "7"}, AS_SLURM),
    (SRUN | OPEN_MPI | {CHOICE: "mpi", "RANK": "3"}, AS_OPEN_MPI),
    (SRUN | MPICH | {CHOICE: "mpi", "RANK": "3"}, AS_MPICH),
    (SRUN | {CHOICE: "none", "RANK": "nonsense"}, SINGLE),
    # The last local rank there can be.
    (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"},
        AS_TORCHRUN._replace(local_size=4, local_rank=3),
    ),
    # Master variables set by hand win over what SLURM and MPI suggest, unless they are empty.
    *(
        (env | BY_HAND, seen._replace(master_addr="h7", master_port=1234))
        for env, seen in ((SRUN, AS_SLURM), (OPEN_MPI, AS_OPEN_MPI), (MPICH, AS_MPICH))
    ),
    (SRUN | {"MASTER_PORT": ""}, AS_SLURM),
    # The port of a SLURM step follows from job and step.
    *(
        (SRUN | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step}, AS_SLURM._replace(master_port=port))
        for job, step, port in (("7", "0", 15007), ("9999", "0", 24999), ("9999", "3", 25002))
    ),
    # Ranks per node may be uneven.
    (UNEVEN | {"SLURM_LOCALID": "0"}, AS_SLURM._replace(local_rank=0, local_size=1)),
    (
        UNEVEN | {"SLURM_NODEID": "0", "SLURM_LOCALID": "2", "SLURM_PROCID": "2"},
        AS_SLURM._replace(rank=2, local_rank=2, local_size=3, node_rank=0),
    ),
]


# As seen under the real launchers, the variables that say nothing left in on purpose.
@pytest.mark.parametrize(("env", "expected"), RECOGNIZED, ids=itertools.count())
def test_the_real_variables_of_each_launcher_are_recognised(env, expected):
    assert detect_launch(env) == expected


def test_the_port_of_open_mpi_differs_between_runs():
    other = detect_launch(OPEN_MPI | {"PMIX_NAMESPACE": "1934360578"})
    assert 15000 <= other.master_port < 25000
    assert other.master_port != AS_OPEN_MPI.master_port


def test_each_rank_of_each_run_has_an_identity_of_its_own():
    others = AS_TORCHRUN._replace(rank=2), AS_TORCHRUN._replace(master_port=1)
    assert AS_TORCHRUN.launch_id not in {other.launch_id for other in others}


REQUIRED = [
    *((TORCHRUN, name, "torchrun") for name in list(TORCHRUN)[:4]),
    *((OPEN_MPI, name, "Open MPI") for name in list(OPEN_MPI)[:4]),
    *((MPICH, name, "MPICH") for name in MPICH if name != "PMI_FD"),
    *((SRUN, f"SLURM_{n}", "a SLURM step") for n in ("PROCID", "LOCALID", "NODEID", "JOB_ID")),
    (TORCHRUN, "MASTER_PORT", "torchrun"),
    (TORCHRUN, "MASTER_ADDR", "torchrun"),
    *((SRUN, f"SLURM_STEP_{n}", "a SLURM step") for n in ("NODELIST", "TASKS_PER_NODE")),
]


@pytest.mark.parametrize("empty", [False, True], ids=["unset", "empty"])
@pytest.mark.parametrize(("env", "name", "launcher"), REQUIRED, ids=[r[1] for r in REQUIRED])
def test_a_partial_set_names_what_is_missing_and_what_is_there(env, name, launcher, empty):
    partial = {**env, name: ""} if empty else {k: v for k, v in env.items() if k != name}
    there = next(other for _, other, of in REQUIRED if of == launcher and other != name)
    refused(
        partial,
        f"the variables of {launcher} must be set together, but `{name}` must still be set",
        f"`{there}`",
        "start the script with the launcher itself",
        "set PARDATA_LAUNCHER=none to run as a single process",
    )


SLURM_TASKS = "SLURM_STEP_TASKS_PER_NODE"
CONTRADICTIONS = [
    (TORCHRUN, {"RANK": "4"}, "the rank must be less than the world size (4)"),
    (TORCHRUN, {"LOCAL_WORLD_SIZE": "5"}, "the local world size must be less than"),
    (MPICH, {"MPI_LOCALRANKID": "2"}, "the local rank must be less"),
    (SRUN, {SLURM_TASKS: "5(x2)"}, "the local world size must be less"),
    (SRUN, {"SLURM_NODEID": "2"}, "the rank of the node must be less than the number of nodes (2)"),
]


@pytest.mark.parametrize(("env", "changes", "what"), CONTRADICTIONS)
def test_numbers_that_contradict_each_other_are_refused(env, changes, what):
    launcher = detect_launch(env).launcher
    refused({**env, **changes}, what, f"but {launcher} set it to", "left over", "contradict")


NO_NUMBERS = [
    *((SRUN | {SLURM_TASKS: text}, SLURM_TASKS, text) for text in ("2(x2", "2,,1", "2 ")),
    ({"SLURM_STEP_ID": "0"}, "SLURM_STEP_NUM_TASKS", ""),
]


@pytest.mark.parametrize(("env", "name", "text"), NO_NUMBERS)
def test_what_is_no_number_or_no_list_of_them_is_shown(env, name, text):
    refused(env, f"`{name}` must ", f", but is {text!r}")


# --- a launcher that nobody knows yet, added as docs/architecture.md says


NEW = dict.fromkeys(("NEW_TASK_RANK", "NEW_TASK_LOCAL_ID", "NEW_JOB_NNODES"), "1")
NEW["NEW_JOB_SIZE"] = "3"


def read_new(env):
    rank, local_rank, nodes, size = (int(env[name]) for name in NEW)
    return LaunchInfo("new", rank, size, local_rank, size // nodes, None, nodes, "h1", 5)


def test_one_row_of_the_table_is_all_that_a_launcher_needs(monkeypatch):
    is_there = lambda env: "NEW_TASK_RANK" in env  # noqa: E731  # short
    row = Launcher("new", tuple(NEW), ("NEW_",), is_there, read_new)
    before = list(LAUNCHERS)
    LAUNCHERS.append(row)
    try:
        for chosen in ({}, {"PARDATA_LAUNCHER": "new"}):
            assert detect_launch(NEW | chosen) == read_new(NEW)
        with pytest.raises(ValueError, match="but new set it to 7: the variables NEW_"):
            detect_launch(NEW | {"NEW_TASK_RANK": "7"})
        # No rank of a test inherits them.
        for name, value in {**NEW, "NEW_OTHER": "x"}.items():
            monkeypatch.setenv(name, value)
        assert not [name for name in _environment({}) if name.startswith("NEW")]
    finally:
        LAUNCHERS[:] = before
