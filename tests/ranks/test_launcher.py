"""Which launcher started this process, from its variables alone."""

import itertools
import re

import pytest
from launched import slurm_variables, torchrun_variables
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

from pardata.ranks._launcher import SINGLE, Launch, detect, launcher_text


def refused(env, *fragments):
    """Show that `env` is refused with a message that says all of this."""
    before = dict(env)
    with pytest.raises(ValueError, match=re.escape(fragments[0])) as caught:
        detect(env)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert env == before


AS_OPEN_MPI = Launch("mpi", 1, 2, 1, 2, None, None, "127.0.0.1", 19738)
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "5"}  # of srun --mpi=pmi2, beside its own
CHOICE = "PARDATA_LAUNCHER"


RECOGNISED = [
    ({}, SINGLE),
    (TORCHRUN, AS_TORCHRUN),
    (RAY, Launch("torchrun", 1, 2, 1, 2, None, None, "192.0.2.2", 41231)),
    (SRUN, AS_SLURM),
    (MPICH, AS_MPICH),
    (OPEN_MPI, AS_OPEN_MPI),
    (SBATCH, SINGLE),
    (SALLOC, SINGLE),
    (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, SINGLE),
    (SBATCH | {"SLURM_STEP_ID": "batch"}, SINGLE),
    # An interactive step has a number, and one task.
    (SALLOC | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, SINGLE),
    # Exported by hand for the job's own use; it makes nobody a rank.
    ({"MASTER_ADDR": "h1", "MASTER_PORT": "29500"}, SINGLE),
    (SRUN | PMI2, AS_SLURM),
    (SRUN | PMI2 | {"SLURM_STEP_NUM_TASKS": "1"}, SINGLE),
    # The order of precedence: torchrun, Open MPI, SLURM, MPICH.
    (MPICH | DAEMON | OPEN_MPI | TORCHRUN, AS_TORCHRUN),
    (SRUN | TORCHRUN, AS_TORCHRUN),
    # Open MPI's own variables, not those of its daemon in the allocation.
    (MPICH | DAEMON | OPEN_MPI, AS_OPEN_MPI),
    (MPICH | SRUN, AS_SLURM),
    # What is chosen goes before all.
    (TORCHRUN | SRUN | {CHOICE: "auto"}, AS_TORCHRUN),
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
]


# As seen under the real launchers, the variables that say nothing left in on purpose.
@pytest.mark.parametrize(("env", "expected"), RECOGNISED, ids=itertools.count())
def test_the_real_variables_of_each_launcher_are_recognised(env, expected):
    assert detect(env) == expected


def test_the_port_of_open_mpi_differs_between_runs():
    other = detect(OPEN_MPI | {"PMIX_NAMESPACE": "1934360578"})
    assert 15000 <= other.master_port < 25000
    assert other.master_port != AS_OPEN_MPI.master_port


@pytest.mark.parametrize("variables", [torchrun_variables, slurm_variables])
def test_all_ranks_of_a_launch_agree_where_to_meet_and_differ_in_identity(variables):
    found = [detect(variables(rank, 4, 29511)) for rank in range(4)]
    assert {(each.master_addr, each.master_port) for each in found} == {
        (found[0].master_addr, 29511)
    }
    assert len({each.identity for each in found}) == 4


@pytest.mark.parametrize("choice", ["torchrun", "slurm", "mpi"])
def test_a_launcher_that_was_chosen_and_is_not_there_is_refused(choice):
    refused({CHOICE: choice}, "must be set together", "must still be set: start")
    if choice == "slurm":
        refused(SBATCH | {CHOICE: choice}, "`SLURM_STEP_ID`", "a SLURM step")
        refused({"SLURM_STEP_ID": "0"}, "`SLURM_STEP_NUM_TASKS` must be a whole number, but is ''")


IDS = [
    *((TORCHRUN, name, "torchrun") for name in list(TORCHRUN)[:4]),
    *((OPEN_MPI, name, "Open MPI") for name in list(OPEN_MPI)[:4]),
    *((MPICH, name, "MPICH") for name in MPICH if name != "PMI_FD"),
    *((SRUN, f"SLURM_{n}", "a SLURM step") for n in ("PROCID", "LOCALID", "NODEID", "JOB_ID")),
    (TORCHRUN, "MASTER_PORT", "torchrun"),
]
REQUIRED = [
    *IDS,
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


NUMBERS = [
    *((env, name) for env, name, _ in IDS),
    (TORCHRUN, "GROUP_RANK"),
    (TORCHRUN, "GROUP_WORLD_SIZE"),
    (SRUN, "SLURM_STEP_NUM_TASKS"),
]


@pytest.mark.parametrize("text", ["two", "-1", "1.0", " 1", "1e3", "\u0663", "1" * 19])
@pytest.mark.parametrize(("env", "name"), NUMBERS, ids=[name for _, name in NUMBERS])
def test_what_is_not_a_number_is_shown(env, name, text):
    refused(
        {**env, name: text},
        f"`{name}` must be a whole number, but is {text!r}",
        "correct it, or set PARDATA_LAUNCHER=none",
    )


CONTRADICTIONS = [
    (TORCHRUN, {"RANK": "4"}, "the rank must be less than the world size (4)"),
    (TORCHRUN, {"LOCAL_RANK": "2"}, "the local rank must be less than the local world size"),
    (TORCHRUN, {"LOCAL_WORLD_SIZE": "5"}, "the local world size must be less than"),
    (TORCHRUN, {"WORLD_SIZE": "0"}, "the rank must be less than the world size (0)"),
    (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "2"}, "the rank must be less"),
    (MPICH, {"MPI_LOCALRANKID": "2"}, "the local rank must be less"),
    (SRUN, {"SLURM_PROCID": "4"}, "the rank must be less"),
    (SRUN, {"SLURM_LOCALID": "2"}, "the local rank must be less"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "5(x2)"}, "the local world size must be less"),
]


@pytest.mark.parametrize(("env", "changes", "what"), CONTRADICTIONS)
def test_numbers_that_contradict_each_other_are_refused(env, changes, what):
    launcher = launcher_text(detect(env))
    refused({**env, **changes}, what, f"but {launcher} set it to", "left over", "contradict")


@pytest.mark.parametrize(("port", "bad"), [("1", "0"), ("65535", "65536")])
def test_the_port_must_be_one(port, bad):
    assert detect({**TORCHRUN, "MASTER_PORT": port}).master_port == int(port)
    text = f"`MASTER_PORT` must be between 1 and 65535, but is {bad}"
    refused({**TORCHRUN, "MASTER_PORT": bad}, text)


@pytest.mark.parametrize("found", [SRUN, OPEN_MPI, MPICH], ids=["slurm", "open-mpi", "mpich"])
def test_torch_variables_exported_by_hand_must_say_what_the_launcher_says(found):
    launch = detect(found)
    assert detect({**found, "RANK": str(launch.rank), "WORLD_SIZE": str(launch.size)}) == launch
    for name, value in (("RANK", launch.rank), ("WORLD_SIZE", launch.size)):
        refused(
            {**found, name: "7"},
            f"`{name}` must be {value}, as {launcher_text(launch)} says, but is 7",
            "unset it, or choose one launcher with PARDATA_LAUNCHER",
        )


SEVERAL_HOSTS = [
    (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_{}", "-x MASTER_ADDR=<host of rank 0>"),
    (MPICH, "MPI_LOCAL{}", "-genv MASTER_ADDR <host of rank 0>"),
]


@pytest.mark.parametrize(("env", "names", "cure"), SEVERAL_HOSTS)
def test_mpi_over_several_hosts_must_be_told_where_rank_0_is(env, names, cure):
    rank, size = ("RANK", "SIZE") if env is OPEN_MPI else ("RANKID", "NRANKS")
    two_hosts = {**env, names.format(size): "1", names.format(rank): "0"}
    says = "`MASTER_ADDR` must be set when MPI spans several hosts (1 of 2 ranks are on this one)"
    refused(two_hosts, says, cure)
    assert detect({**two_hosts, "MASTER_ADDR": "h7"}).master_addr == "h7"


def test_master_variables_set_by_hand_win_over_what_slurm_and_mpi_suggest():
    own = {"MASTER_ADDR": "h7", "MASTER_PORT": "1234"}
    for env in (SRUN, OPEN_MPI, MPICH):
        found = detect({**env, **own})
        assert (found.master_addr, found.master_port) == ("h7", 1234)
        empty = detect({**env, "MASTER_PORT": ""})
        assert empty == detect(env)


@pytest.mark.parametrize(
    ("job", "step", "port"),
    [("7", "0", 15007), ("81234", "0", 16234), ("9999", "0", 24999), ("9999", "3", 25002)],
)
def test_the_port_of_a_slurm_step_follows_from_job_and_step(job, step, port):
    assert detect({**SRUN, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).master_port == port


def test_ranks_per_node_may_be_uneven():
    uneven = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"}
    assert detect(uneven).local_size == 1
    first = detect({**uneven, "SLURM_NODEID": "0", "SLURM_LOCALID": "2", "SLURM_PROCID": "2"})
    assert (first.local_size, first.num_nodes, first.node_rank) == (3, 2, 0)


@pytest.mark.parametrize("text", ["2(x2", "two", "2,,1", "2(x)", "2 ", "(x2)"])
def test_a_list_of_tasks_per_node_must_be_one_and_have_this_node(text):
    name = "SLURM_STEP_TASKS_PER_NODE"
    refused(SRUN | {name: text}, f"`{name}` must look like '2(x3),1', but is {text!r}")
    says = "the rank of the node must be less than the number of nodes (2), but SLURM set it to 2"
    refused(SRUN | {"SLURM_NODEID": "2"}, says)
