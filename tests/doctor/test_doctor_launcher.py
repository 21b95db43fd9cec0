"""What the doctor says of launchers: the one chosen, its variables, and those left aside."""

import pytest
from launched import slurm_variables, torchrun_variables

from pardata.doctor._finding import ERROR, OK, WARNING
from pardata.doctor._launchers import examine_launcher

BATCH_SHELL = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": value
    for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))
}


def look(env):
    """Return name, status and text of each finding, and all cures."""
    launch, findings = examine_launcher(env)
    cures = " | ".join(finding.cure for finding in findings if finding.cure)
    return launch, [(f.name, f.status, f.text) for f in findings], cures


def test_without_any_variable_it_is_a_single_process():
    launch, findings, cures = look({"MASTER_ADDR": "n1"})  # an address says nothing of a launcher
    assert launch.size == 1
    assert findings == [("launcher", OK, "none: a single process")]
    assert cures == ""


@pytest.mark.parametrize(
    ("env", "start", "names"),
    [
        (
            torchrun_variables(1, 3, 5),
            "torchrun: 3 processes, to meet at 127.0.0.1:5; from RANK, WORLD_SIZE, LOCAL_RANK, ",
            "MASTER_ADDR, MASTER_PORT",
        ),
        (
            slurm_variables(1, 2, 5),
            "SLURM: 2 processes, to meet at localhost:5; from SLURM_PROCID, ",
            "SLURM_STEP_ID",
        ),
        (
            OPEN_MPI | {"MASTER_PORT": "5"},
            "Open MPI: 2 processes, to meet at 127.0.0.1:5; from OMPI_COMM_WORLD_RANK, ",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        (
            MPICH | {"MASTER_PORT": "5"},
            "MPICH: 2 processes, to meet at 127.0.0.1:5; from PMI_RANK, ",
            "MPI_LOCALNRANKS",
        ),
        (torchrun_variables(0, 1, 5), "torchrun: 1 process, to meet at ", "RANK"),
    ],
)
def test_a_launcher_is_named_with_its_variables(env, start, names):
    launch, ((name, status, text),), cures = look(env)
    assert launch is not None
    assert (name, status, cures) == ("launcher", OK, "")
    assert text.startswith(start)
    assert names in text


@pytest.mark.parametrize(
    ("env", "chosen", "left_aside"),
    [
        (
            torchrun_variables(1, 2, 5) | slurm_variables(1, 2, 5),
            "torchrun: 2",
            "SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID and 5 more (SLURM): torchrun goes f",
        ),
        (
            OPEN_MPI | BATCH_SHELL,
            "Open MPI: 2",
            "SLURM_PROCID, SLURM_LOCALID, SLURM_JOB_ID (SLURM): Open MPI goes first",
        ),
        (
            slurm_variables(1, 2, 5) | {"RANK": "1"},
            "SLURM: 2",
            "RANK (torchrun): incomplete, and they agree with SLURM",
        ),
        (
            slurm_variables(1, 2, 5) | torchrun_variables(0, 4, 5) | {"PARDATA_LAUNCHER": "slurm"},
            "SLURM, as PARDATA_LAUNCHER=slurm says: 2",
            "RANK, WORLD_SIZE, LOCAL_RANK and 1 more (torchrun): PARDATA_LAUNCHER=slurm decides",
        ),
        (
            torchrun_variables(1, 2, 5) | {"PARDATA_LAUNCHER": "none"},
            "none, as PARDATA_LAUNCHER=none says: a single process",
            "RANK, WORLD_SIZE, LOCAL_RANK and 1 more (torchrun): PARDATA_LAUNCHER=none decides",
        ),
        (
            MPICH | BATCH_SHELL | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},
            "none: a single process",
            "PMI_RANK, PMI_SIZE, MPI_LOCALRANKID and 1 more (MPICH): of a step of one task",
        ),
        (
            BATCH_SHELL | {"SLURM_NTASKS": "1"},
            "none: a single process",
            "SLURM_PROCID, SLURM_LOCALID, SLURM_JOB_ID (SLURM): of the shell of a job, not of a s",
        ),
    ],
)
def test_the_variables_of_other_launchers_are_shown_with_why_they_do_not_count(
    env, chosen, left_aside
):
    _, findings, cures = look(env)
    assert findings[0][:2] == ("launcher", OK)
    assert findings[0][2].startswith(chosen)
    assert {(name, status) for name, status, _ in findings[1:]} == {("ignored", OK)}
    assert any(text.startswith(left_aside) for _, _, text in findings[1:])
    assert cures == ""


def test_the_shell_of_a_job_of_several_tasks_is_told_to_use_srun():
    launch, findings, cures = look(BATCH_SHELL | {"SLURM_NTASKS": "4"})
    assert launch.size == 1
    assert [(name, status) for name, status, _ in findings] == [
        ("launcher", OK),
        ("ignored", WARNING),
    ]
    assert cures == "start the script with srun, to be the 4 tasks that the job asked for"


@pytest.mark.parametrize(
    ("env", "text", "cure", "seen"),
    [
        (
            {"RANK": "0"},
            "`WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` must",
            "start the script with the launcher itself, or set PARDATA_LAUNCHER=none",
            "RANK (torchrun)",
        ),
        (
            torchrun_variables(2, 2, 5, LOCAL_RANK="0") | MPICH,
            "the rank must be less than the world size (2), but torchrun set it to 2",
            "contradict each other, or are left over from another run; set PARDATA_LAUNCHER=none",
            "LOCAL_WORLD_SIZE (torchrun); PMI_RANK",
        ),
        (
            slurm_variables(1, 2, 5) | {"RANK": "0"},
            "`RANK` must be 1, as SLURM says, but is 0",
            "unset it, or choose one launcher with PARDATA_LAUNCHER",
            "RANK (torchrun); SLURM_PROCID",
        ),
        (
            torchrun_variables(0, 2, 99999),
            "`MASTER_PORT` must be between 1 and 65535, but is 99999",
            "correct it, or set PARDATA_LAUNCHER=none",
            "RANK, WORLD_SIZE",
        ),
        (
            BATCH_SHELL | {"PARDATA_LAUNCHER": "srun"},
            "`PARDATA_LAUNCHER` must be one of auto, torchrun, slurm, mpi, none, but is 'srun'",
            "correct it, or set PARDATA_LAUNCHER=none",
            "SLURM_PROCID, SLURM_LOCALID, SLURM_JOB_ID (SLURM)",
        ),
    ],
)
def test_wrong_variables_are_an_error_with_its_cure_and_all_that_is_there(env, text, cure, seen):
    launch, findings, cures = look(env)
    assert launch is None
    assert findings[0][:2] == ("launcher", ERROR)
    assert text in findings[0][2]
    assert cure in cures
    assert cures not in findings[0][2]
    assert findings[1][:2] == ("variables", OK)
    assert seen in findings[1][2]
