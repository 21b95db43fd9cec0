"""Meeting the other ranks: devices, addresses, who is missing, and coming back."""

import os
import re
import socket
import sys
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from launch_zoo import open_mpi_variables
from launched import agent, launched, reserved_port, slurm_variables, torchrun_variables
from on_ranks import caught, run
from pretended import accelerators

from pardata import all_reduce_sum, barrier, init, rank_zero_call, world
from pardata.launch import _address as address
from pardata.launch import _rendezvous as rendezvous
from pardata.launch._address import _opened_stores, not_met
from pardata.launch._rendezvous import own_device
from pardata.messages._store import append
from pardata.messages._turn import call_off
from pardata.ranks._launcher import Launch
from pardata.ranks._world import new_channel

SOON, LONG = timedelta(seconds=2), timedelta(seconds=60)


def launch(local_rank, local_size):
    """Return a launch on one host."""
    numbers = (local_rank, local_size) * 2
    return Launch("torchrun", *numbers, 0, 1, "127.0.0.1", 1)


# --- which device


def pretend_gpus(count, uuid=None, kind="cuda"):
    """Make this process see GPUs for a block, without touching a driver."""

    def told(device):
        return SimpleNamespace(uuid=uuid or f"GPU-{device.index}", total_memory=0)

    return accelerators(count, kind=kind, get_device_properties=told)


MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("visible", [0, 1, 2, 3])
@pytest.mark.parametrize("local_rank", [0, 1, 2])
def test_a_local_rank_gets_the_gpu_of_its_number_or_the_only_one_it_is_shown_or_an_error(
    mask, visible, local_rank, monkeypatch
):
    for name in MASKS:
        monkeypatch.delenv(name, raising=False)
    if mask is not None:
        monkeypatch.setenv(mask, "5")
    with pretend_gpus(visible):
        found = caught(own_device, launch(local_rank, 4), None)
    if visible == 0:
        assert found == torch.device("cpu")
    elif local_rank < visible or (visible == 1 and mask is not None):
        assert found == torch.device("cuda", min(local_rank, visible - 1))
    else:
        processes = f"{visible} process{'es' if visible > 1 else ''}"
        assert found.text == (
            f"the local rank must be less than the number of visible GPUs, {visible}, but is "
            f"{local_rank} of 4 on {socket.gethostname()}: start {processes} per node (torchrun "
            f"--nproc-per-node={visible}, srun --ntasks-per-node={visible}), or pass "
            f'`init(device="cpu")`'
        )


OF_KINDS = [
    ("cuda", 1, None, "cuda:0"),
    ("xpu", 1, None, "xpu:0"),
    ("mps", 1, None, "mps:0"),
    ("mps", 2, None, "cpu"),  # its ranks could not send from there
    ("mps", 2, "mps", "mps:0"),  # refused by the backend's name
]


@pytest.mark.parametrize(("kind", "size", "wanted", "device"), OF_KINDS)
def test_any_accelerator_that_torch_has_is_taken_where_ranks_can_send_from_it(
    kind, size, wanted, device
):
    with accelerators(1, kind=kind):
        found = own_device(launch(0, size), None if wanted is None else torch.device(wanted))
    assert str(found) == device


def join_over_nccl():
    return caught(lambda: init(backend="nccl", device="cpu", timeout=timedelta(seconds=20)))


def test_a_backend_that_takes_no_cpu_is_an_error_with_the_cure_on_every_rank():
    text = (
        "`device` must be one from which ranks can send over 'nccl', but is 'cpu': leave out "
        "`backend`"
    )
    raised = [(each.type, each.text) for each in launched(join_over_nccl, size=2)]
    assert raised == [("RuntimeError", text)] * 2


def join_with_gpus(counts, uuid=None, kind="cuda", **arguments):
    with pretend_gpus(counts[int(os.environ["RANK"])], uuid, kind):
        raised = caught(lambda: init(timeout=timedelta(seconds=20), **arguments))
    return raised, dist.is_initialized()


ON_ONE = (
    f"every rank must have a GPU of its own, but ranks 0, 1, 2 on {socket.gethostname()} share "
    f'one: start one process per GPU, or pass `init(backend="gloo")`, which can share (slowly)'
)
KINDS = "every rank must pass the same to `init`, but `backend` differs:"
TABLE = "rank 0: backend='cuda:nccl,cpu:gloo'\n  rank 1: backend='gloo'"


NO_GROUPS = [
    ([3, 3, 3], "GPU-7", ON_ONE, ON_ONE),
    ([2, 0], None, f"{KINDS}\n  {TABLE}", KINDS),
]


@pytest.mark.parametrize(
    ("counts", "uuid", "says", "own"), NO_GROUPS, ids=["the same", "of other kinds"]
)
def test_gpus_that_make_no_group_are_an_error_on_every_rank_at_once(counts, uuid, says, own):
    outcomes = launched(join_with_gpus, counts, uuid, size=len(counts))
    for rank, (raised, initialized) in enumerate(outcomes):
        assert raised.type == "RuntimeError"
        assert raised.text.startswith(own if rank == len(counts) - 1 else says)
        assert raised.seconds < 10
        assert not initialized


def join_and_note_the_bound(counts, kind="cuda"):
    """Join, where the group of GPUs is made as one of gloo, and say to which GPU it was bound."""
    make, asked = dist.init_process_group, []

    def init_process_group(backend, device_id, **kwargs):
        asked.append((backend, str(device_id)))
        make("gloo", **kwargs)

    with patch.object(dist, "init_process_group", init_process_group):
        raised, _ = join_with_gpus(counts, kind=kind)
    assert raised.size == len(counts)
    return asked


BOUND = [
    ([2, 2], ["cuda:0", "cuda:1"]),
    # A model may be spread over the GPUs of a process.
    ([4, 4], ["None", "None"]),
    # All ranks or none: who is bound waits for the others to connect.
    ([2, 4], ["None", "None"]),
]


@pytest.mark.parametrize(("counts", "bound"), BOUND, ids=str)
def test_a_group_is_bound_to_one_gpu_only_where_a_process_has_one(counts, bound):
    found = launched(join_and_note_the_bound, counts, size=2)
    assert found == [[("cuda:nccl,cpu:gloo", device)] for device in bound]


@pytest.mark.oldest
def test_another_accelerator_has_its_own_backend_and_is_bound_too():
    found = launched(join_and_note_the_bound, [2, 2], "xpu", size=2)
    assert found == [[("xpu:xccl,cpu:gloo", f"xpu:{rank}")] for rank in range(2)]


def join_on_bad_device(bad):
    device = "cuda" if int(os.environ["RANK"]) in bad else "cpu"
    raised = caught(lambda: init(device=device, timeout=timedelta(seconds=20)))
    # The launch is not spoilt: with a good device the same ranks can join.
    with init() as here:
        return raised, all_reduce_sum(1), here.size


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("bad", [[1], [0, 1]], ids=str)
def test_a_device_that_is_not_there_is_an_error_on_every_rank_and_a_second_try_works(bad):
    for rank, (raised, total, size) in enumerate(launched(join_on_bad_device, bad, size=2)):
        text = "`device` must be one that is here, but is 'cuda': PyTorch sees the CPU"
        assert raised.type == "RuntimeError"
        if rank in bad:
            assert raised.text == text
        else:
            assert f"rank {bad[0]} failed in `init`: RuntimeError: {text}" in raised.text
        assert raised.seconds < 10
        assert total == size == 2


# --- where to meet


def test_a_rank_0_that_is_not_there_is_named_with_its_address_in_time(monkeypatch):
    with reserved_port() as port:
        for name, value in slurm_variables(1, 2, port).items():
            monkeypatch.setenv(name, value)
        raised = caught(lambda: init(timeout=timedelta(seconds=3)))
    assert str(raised) == (
        f"RuntimeError: rank 1 must reach rank 0 at localhost:{port}, but could not within "
        f"0:00:03: is rank 0 running, and is the port open between the hosts?"
    )
    assert raised.seconds >= 3


class Clock:
    """Stands still until rank 0 has read that all have come that will, and is far ahead then."""

    def __init__(self, store, ranks):
        self.store, self.ranks, self.sleep = store, ranks, time.sleep
        self.looks = 0  # while all are there; between two of them rank 0 reads who is

    def monotonic(self):
        self.looks += len(self.store.get("came").decode().split()) == self.ranks
        return 1e9 if self.looks > 2 else 0.0


def join_where_rank_0_is_late(patience):
    if os.environ["RANK"] == "0":
        return None
    connect = address._opened  # to the agent, which is there: however long that takes
    with patch.object(address, "_opened", lambda launch, _: connect(launch, LONG)):
        return caught(lambda: init(timeout=patience))


def test_a_rank_0_that_never_comes_is_named():
    _, raised = launched(join_where_rank_0_is_late, SOON, size=2)
    assert raised.type == "TimeoutError"
    assert raised.seconds < LONG.total_seconds() / 2
    assert raised.text == str(not_met([0], 2, SOON))


def join_unless(absent):
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])
    if rank in absent:
        return None
    part_of = dist.PrefixStore

    def part(name, store):
        made = part_of(name, store)
        if rank == 0:
            rendezvous.time = Clock(made, size - len(absent) - 1)
        return made

    with patch.object(rendezvous, "time", time), patch.object(dist, "PrefixStore", part):
        return caught(lambda: init(timeout=LONG))


def test_ranks_that_never_come_are_named_on_every_rank_that_did():
    outcomes = launched(join_unless, [1, 3], size=4, variables=slurm_variables)
    assert outcomes[1] is outcomes[3] is None
    for raised in (outcomes[0], outcomes[2]):
        assert raised.type == "TimeoutError"
        assert raised.text == str(not_met([1, 3], 4, LONG))
        assert raised.seconds < LONG.total_seconds() / 2


# --- coming back


def leave_traces_then_fail():
    """Be the attempt that torchrun restarts: unequal numbers of calls, and nobody leaves."""
    here = init()
    all_reduce_sum(1)
    if here.rank == 0:
        with pytest.raises(TimeoutError):
            barrier("only on rank 0", timeout=timedelta(seconds=0.2))


def work_as_usual():
    with init(timeout=timedelta(seconds=20)) as here:
        barrier("start")
        return here.rank, all_reduce_sum(1)


def test_a_store_that_outlives_a_failed_attempt_of_any_size_does_not_disturb_the_next():
    # torchrun's agent serves one store for all attempts: its processes are new, the store is not.
    with agent() as port:
        for size in (3, 1, 2):
            launched(leave_traces_then_fail, size=size, MASTER_PORT=str(port))
            found = launched(work_as_usual, size=size, MASTER_PORT=str(port))
            assert found == [(rank, size) for rank in range(size)]


def use_the_address_after_leaving():
    with init() as here:
        pass
    # The user's own group, at the address that we served.
    os.environ.update(RANK=str(here.rank), WORLD_SIZE=str(here.size))
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    total = torch.ones(1)
    dist.all_reduce(total)
    launcher = world().launcher
    dist.barrier()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    return total.item(), launcher


def test_after_leaving_the_address_is_free_for_a_group_of_the_users_own():
    outcomes = launched(
        use_the_address_after_leaving, size=2, variables=slurm_variables, MASTER_ADDR="localhost"
    )
    assert outcomes == [(2.0, "existing")] * 2


def adopt_after_an_attempt_that_failed():
    rank, store = dist.get_rank(), new_channel(None)
    for _ in range(rank):  # it was a call ahead of rank 0
        caught(barrier, "", 0.1)
    call_off(store, f"rank {rank} of 2 failed first: ValueError: of the attempt before")
    append(store.store, "failures", "of the attempt before")
    dist.barrier()
    with init(timeout=timedelta(seconds=20)) as here:
        barrier("start")
        return here.launcher, all_reduce_sum(1), rank_zero_call(str, 7)


def test_a_group_that_is_adopted_after_a_restart_hears_nothing_of_the_attempt_before():
    found = run(adopt_after_an_attempt_that_failed, world_size=2, fresh=True)
    assert found == [("existing", 2, "7")] * 2


# --- nobody is on the way alone


BOTH = ["init_process_group", "new_group"]  # that of small numbers


def join_slowly(slow, maker, folder):
    """Join, or adopt; the slow rank's connections take a moment more."""
    is_slow = slow == (dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]))
    make = getattr(dist, maker)

    def make_slowly(*args, **kwargs):
        made = make(*args, **kwargs)
        time.sleep(0.5)
        (folder / "made").touch()
        return made

    made_here = make_slowly if is_slow else make
    with patch.object(dist, maker, made_here), init(timeout=timedelta(seconds=20)):
        return (folder / "made").exists()


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("maker", BOTH)
def test_init_returns_when_every_rank_has_made_its_groups(slow, maker, tmp_path):
    # Else a rank that leaves at once closes connections that another is still making.
    assert launched(join_slowly, slow, maker, tmp_path, size=2) == [True, True]


def test_who_adopts_a_group_waits_too_until_every_rank_has_made_the_one_beside_it(tmp_path):
    assert run(join_slowly, 1, "new_group", tmp_path, world_size=2) == [True, True]


CLOSED = "[gloo/transport/tcp/pair.cc:1] Connection closed by peer"


def join_without_a_link(bad, others_see_it, maker):
    """Join where a rank cannot connect; the others see that later, or not at all."""
    rank, make = int(os.environ["RANK"]), getattr(dist, maker)

    def fail_after_all(*args, **kwargs):
        make(*args, **kwargs)
        if rank != bad:
            time.sleep(0.5)
        # Raised in C++, as gloo does.
        torch.ops.aten._assert_scalar(False, "no route to host" if rank == bad else CLOSED)

    causes = []

    def join():
        try:
            init(timeout=timedelta(seconds=20))
        except RuntimeError as error:
            causes.append(str(error.__cause__))
            raise

    fails = rank == bad or others_see_it
    with patch.object(dist, maker, fail_after_all if fails else make):
        raised = caught(join)
    return raised, causes, dist.is_initialized()


# Each two of the three choices meet once.
@pytest.mark.parametrize(
    ("bad", "others_see_it", "maker"),
    [(0, False, BOTH[0]), (2, True, BOTH[0]), (2, False, BOTH[1]), (0, True, BOTH[1])],
)
def test_a_rank_that_cannot_make_a_group_is_an_error_on_every_rank(bad, others_see_it, maker):
    outcomes = launched(join_without_a_link, bad, others_see_it, maker, size=3)
    for rank, (raised, causes, initialized) in enumerate(outcomes):
        assert raised.type == "RuntimeError"
        own_is_kept = others_see_it and rank != bad
        assert causes == [CLOSED if own_is_kept else "None"]
        if rank == bad:
            assert raised.text == "no route to host"
        else:
            first, *later, seen = raised.text.splitlines()
            assert first == f"rank {bad} failed in `init`: RuntimeError: no route to host"
            assert len(later) == (2 if others_see_it else 0)
            assert seen == f"(seen on rank {rank}, which did nothing wrong)"
        assert not initialized


# --- nodes


def join_from(hosts):
    name = hosts[int(os.environ["OMPI_COMM_WORLD_RANK"])]
    with patch.object(socket, "gethostname", lambda: name), init() as here:
        return here.node_rank, here.num_nodes, here.local_rank, here.launcher


def test_under_mpi_the_nodes_are_counted_by_the_names_of_the_hosts():
    hosts = ["b", "b", "a", "a"]
    variables = partial(open_mpi_variables, local_size=2)
    outcomes = launched(join_from, hosts, size=4, variables=variables)
    assert outcomes == [(rank // 2, 2, rank % 2, "mpi") for rank in range(4)]


# --- whose run it is


def by_hand(rank, size, port, **changes):
    gone = dict.fromkeys(("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"))
    return torchrun_variables(rank, size, port, **gone, **changes)


def spawned(rank, port):
    os.environ.update(by_hand(rank, 2, port))
    with init(timeout=timedelta(seconds=30)) as here:
        assert here.size == 2


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.soak), "fork"])
def test_children_of_a_script_are_one_group_with_it(method, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    with reserved_port() as port:
        torch.multiprocessing.start_processes(spawned, (port,), 2, start_method=method)


def of_two_runs(rank, size, port, **changes):
    # Of jobs 10,000 apart with the same step, whose default port would be the same.
    return slurm_variables(rank, size, port, SLURM_JOB_ID=str(123456 + 10000 * rank), **changes)


def join_in_two_seconds():
    # The other one raises as soon as it has read whose store it is.
    patience = timedelta(seconds=2) if os.environ["SLURM_PROCID"] == "0" else LONG
    try:
        with init(timeout=patience):
            pass
    except RuntimeError:
        assert not _opened_stores  # a second try would meet the other run's again
        raise


def test_a_rank_of_another_run_is_told_whose_store_it_met_and_is_no_part_of_it():
    first, second = launched(join_in_two_seconds, size=2, variables=of_two_runs)
    assert str(first).startswith(
        "TimeoutError: `init` must be reached by every rank, but rank 1 of 2 did not"
    )
    assert second.type == "RuntimeError"
    assert second.seconds < 30
    assert re.fullmatch(
        r"all ranks that meet at localhost:\d+ must be of one run, but the store there is that of "
        r"SLURM job 123456, step 0, start 0, and this rank is of SLURM job 133456, step 0, "
        r"start 0: end the other run, or give this one a port of its own by MASTER_PORT",
        second.text,
    )
