"""Meeting the other ranks: devices, addresses, who is missing, and coming back."""

import gc
import logging
import os
import re
import socket
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from launched import agent, launched, reserved_port, slurm_variables
from logged import kept
from on_ranks import caught, run
from pretended import accelerators
from processes import wait_for

from pardata import all_reduce_mean, all_reduce_sum, barrier, init, rank_zero_call, world
from pardata.environment._launchers import LaunchInfo
from pardata.environment._world import group_state, new_store_client
from pardata.process_group import _tcp_store as tcp_store
from pardata.process_group._rendezvous import select_device
from pardata.store._client import append
from pardata.store._round import abort_rounds

SOON, LONG = timedelta(seconds=4), timedelta(seconds=60)


# --- which device


# The kind of accelerator, how many are seen, and the variable that hides others; the local rank and
# the world size; what this rank gets, None for an error.
CHOSEN = [
    (("cuda", 0, ""), 1, 4, "cpu"),
    (("cuda", 3, ""), 2, 4, "cuda:2"),
    (("cuda", 2, "CUDA_VISIBLE_DEVICES"), 1, 4, "cuda:1"),
    (("cuda", 1, "CUDA_VISIBLE_DEVICES"), 2, 4, "cuda:0"),  # it is shown its own one
    (("cuda", 1, "HIP_VISIBLE_DEVICES"), 2, 4, "cuda:0"),
    (("cuda", 1, "ROCR_VISIBLE_DEVICES"), 2, 4, "cuda:0"),
    (("cuda", 1, ""), 1, 4, None),
    (("cuda", 2, "CUDA_VISIBLE_DEVICES"), 2, 4, None),
    (("xpu", 1, ""), 0, 1, "xpu:0"),
    (("mps", 1, ""), 0, 1, "mps:0"),
    (("mps", 1, ""), 0, 2, "cpu"),  # its ranks could not send from there
]


@pytest.mark.parametrize(("machine", "local_rank", "ranks", "device"), CHOSEN)
def test_a_rank_selects_its_gpu_or_the_only_visible_one(
    machine, local_rank, ranks, device, monkeypatch
):
    kind, seen, mask = machine
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    if mask:
        monkeypatch.setenv(mask, "5")
    with accelerators(seen, kind=kind):
        numbers = (local_rank, ranks) * 2
        launch = LaunchInfo("torchrun", *numbers, 0, 1, "127.0.0.1", 1)
        found = caught(select_device, launch, None)
    if device is not None:
        assert str(found) == device
    else:
        says = f"the number of visible GPUs, {seen}, but is {local_rank} on "
        assert says in found.text
        assert (
            f"pass torchrun --nproc-per-node={seen}, srun --ntasks-per-node={seen}, or "
            in found.text
        )


class Uuid:
    """A uuid as CUDA's: only its text says which one it is."""

    def __init__(self, text):
        self.text = text

    def __str__(self):
        return self.text

    def __repr__(self):
        return f"<a uuid in process {os.getpid()}>"


def join_with_gpus(counts, uuid=None, kind="cuda"):
    """Join where this process sees GPUs, without touching a driver."""

    def told(device):
        return SimpleNamespace(uuid=Uuid(uuid or f"GPU-{device.index}"), total_memory=0)

    seen = counts[int(os.environ["RANK"])]
    with accelerators(seen, kind=kind, get_device_properties=told):
        raised = caught(lambda: init(timeout=timedelta(seconds=20)))
    return raised, dist.is_initialized()


NO_GROUPS = {
    "the same": ([1, 1, 1], "GPU-7", "share one GPU: start one per GPU, or "),
    "of other kinds": ([2, 0], None, "every rank must pass the same to `init`, but `backend` diff"),
}


@pytest.mark.parametrize(("counts", "uuid", "says"), NO_GROUPS.values(), ids=NO_GROUPS)
def test_gpus_that_cannot_form_a_group_raise_on_every_rank(counts, uuid, says):
    mask = {"CUDA_VISIBLE_DEVICES": "0"} if counts[0] == 1 else {}  # one GPU for each task
    for raised, initialized in launched(join_with_gpus, counts, uuid, size=len(counts), **mask):
        assert (raised.type, initialized) == ("RuntimeError", False)
        assert says in raised.text
        assert raised.seconds < 10


def join_and_note_the_bound(counts, kind, uuid=None):
    """Join, where the group of GPUs is made as one of gloo, and say to which GPU it was bound."""
    make, asked = dist.init_process_group, []

    def init_process_group(backend, device_id, **kwargs):
        asked.append((backend, str(device_id)))
        make("gloo", **kwargs)

    with patch.object(dist, "init_process_group", init_process_group):
        join_with_gpus(counts, uuid, kind)
    return asked


BOUND = [
    ("cuda", [2, 2], "cuda:nccl,cpu:gloo", ["cuda:0", "cuda:1"]),
    # A model may be spread over the GPUs of a process.
    ("cuda", [4, 4], "cuda:nccl,cpu:gloo", ["None", "None"]),
    # All ranks or none: who is bound waits for the others to connect.
    ("cuda", [2, 4], "cuda:nccl,cpu:gloo", ["None", "None"]),
    ("xpu", [2, 2], "xpu:xccl,cpu:gloo", ["xpu:0", "xpu:1"]),
]


@pytest.mark.parametrize(("kind", "counts", "backend", "bound"), BOUND)
def test_only_a_process_with_one_gpu_binds_the_group(kind, counts, backend, bound):
    found = launched(join_and_note_the_bound, counts, kind, size=2)
    assert found == [[(backend, device)] for device in bound]


def test_parts_of_a_gpu_with_one_uuid_form_a_group():
    found = launched(join_and_note_the_bound, [2, 2], "cuda", "GPU-7", size=2)
    assert [device for ((_, device),) in found] == ["cuda:0", "cuda:1"]


def join_on_bad_device(bad):
    device = "cuda" if int(os.environ["RANK"]) in bad else "cpu"
    raised = caught(lambda: init(device=device, timeout=timedelta(seconds=20)))
    # The launch is not spoilt: with a good device the same ranks can join.
    with init() as here:
        return raised, all_reduce_sum(1), here.size


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_init_works_again_after_a_missing_device_raised_on_every_rank():
    text = "`device` must be one that this machine has, but is 'cuda': "
    outcomes = launched(join_on_bad_device, [1, 2], size=3)
    for rank, (raised, total, size) in enumerate(outcomes):
        assert raised.type == "RuntimeError"
        own = f"RuntimeError: {text}"
        told = [text] if rank else [f"rank {bad} failed in `init`: {own}" for bad in (1, 2)]
        assert all(one in raised.text for one in told)
        assert raised.text.endswith("(seen on rank 0, which did nothing wrong)") == (rank == 0)
        assert raised.seconds < 10
        assert total == size == 3


# --- where to meet


def test_a_missing_rank_0_raises_a_timeout_with_its_address(monkeypatch):
    with reserved_port() as port:
        for name, value in slurm_variables(1, 2, port).items():
            monkeypatch.setenv(name, value)
        raised = caught(lambda: init(timeout=timedelta(seconds=1)))
    assert raised.type == "DistNetworkError"
    assert re.search(
        rf"timed out after 1000ms while trying to connect to .*localhost, {port}", raised.text
    )
    assert raised.seconds >= 1


def join_unless(absent):
    return None if int(os.environ["RANK"]) in absent else caught(lambda: init(timeout=SOON))


@pytest.mark.parametrize(
    ("absent", "size", "names"), [([0], 2, "rank 0 of 2"), ([1, 3], 4, "ranks 1, 3 of 4")]
)
def test_ranks_that_never_come_are_named_on_every_rank_that_did(absent, size, names):
    says = f"`init` must be reached by every rank, but {names} did not come within {SOON}"
    for rank, raised in enumerate(launched(join_unless, absent, size=size)):
        if rank not in absent:
            assert (raised.type, raised.text[: len(says)]) == ("TimeoutError", says)


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


def test_traces_of_a_failed_attempt_do_not_disturb_the_next():
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
    address = f"tcp://localhost:{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", address, rank=here.rank, world_size=here.size)
    return all_reduce_sum(1), world().launcher


def test_the_address_is_free_after_leaving_the_group():
    outcomes = launched(use_the_address_after_leaving, size=2, variables=slurm_variables)
    assert outcomes == [(2, "existing")] * 2


def adopt_after_an_attempt_that_failed():
    rank, store = dist.get_rank(), new_store_client(None)
    abort_rounds(store, f"rank {rank} of 2 failed first: ValueError: of the attempt before")
    append(store.store, "reports", "of the attempt before")
    dist.barrier()
    with init(timeout=timedelta(seconds=20)) as here:
        barrier("start")
        return here.launcher, all_reduce_sum(1), rank_zero_call(str, 7)


def test_an_adopted_group_ignores_the_attempt_before_a_restart():
    found = run(adopt_after_an_attempt_that_failed, world_size=2, fresh=True)
    assert found == [("existing", 2, "7")] * 2


def sockets():
    """Return the number of open sockets of this process."""
    links = (file for file in Path("/proc/self/fd").iterdir() if file.is_symlink())
    return sum(str(link.readlink()).startswith("socket") for link in links)


def destroy_an_adopted_group():
    """Return whether the connections close, of a group that `init` adopts, and of another."""
    gc.disable()
    before, found = sockets(), []
    for joins in (True, False):
        dist.init_process_group("gloo")
        if joins:
            init()
        all_reduce_mean(1.0)
        opened = sockets() > before
        dist.destroy_process_group()
        wait_for(lambda: sockets() == before, 20)  # the thread of the store's client ends
        found.append(opened and world().launcher == "single")
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts sockets in /proc")
def test_an_adopted_group_that_its_owner_destroys_closes_its_connections():
    assert launched(destroy_an_adopted_group, size=1) == [[True, True]]


# --- nobody is on the way alone


def join_slowly(maker, folder):
    """Join; the connections of rank 1 take a moment more."""
    make = getattr(dist, maker)

    def make_slowly(*args, **kwargs):
        made = make(*args, **kwargs)
        time.sleep(0.5)
        (folder / "made").touch()
        return made

    made_here = make_slowly if os.environ["RANK"] == "1" else make
    with patch.object(dist, maker, made_here), init(timeout=timedelta(seconds=20)):
        return (folder / "made").exists()


@pytest.mark.parametrize("maker", ["init_process_group", "new_group"])  # that of small numbers
def test_init_returns_when_every_rank_has_made_its_groups(maker, tmp_path):
    # Else a rank that leaves at once closes connections that another is still making.
    assert launched(join_slowly, maker, tmp_path, size=2) == [True, True]


def join_once_it_is_logged():
    """Return what `init` logs while the backend connects the ranks."""
    _, keeper = kept("pardata.process_group._init", logging.WARNING)
    make = dist.init_process_group

    def make_later(*args, **kwargs):
        while not keeper.lines:
            time.sleep(0.02)
        return make(*args, **kwargs)

    with patch.object(dist, "init_process_group", make_later), init(hang_after=0.2):
        return keeper.lines


def test_a_slow_init_is_logged_on_every_rank():
    for rank, lines in enumerate(launched(join_once_it_is_logged, size=2)):
        assert re.fullmatch(
            rf"\[{rank}/2\] init \(torchrun:{rank}/2@127\.0\.0\.1:\d+\) still waits for other "
            r"ranks: were all started, and can they reach each other\?",
            lines[0],
        )


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

    fails = rank == bad or others_see_it
    with patch.object(dist, maker, fail_after_all if fails else make):
        raised = caught(lambda: init(timeout=timedelta(seconds=20)))
    return raised, dist.is_initialized()


@pytest.mark.parametrize(
    ("bad", "others_see_it", "maker"), [(0, False, "init_process_group"), (2, True, "new_group")]
)
def test_a_failed_group_creation_raises_on_every_rank(bad, others_see_it, maker):
    outcomes = launched(join_without_a_link, bad, others_see_it, maker, size=3)
    for rank, (raised, initialized) in enumerate(outcomes):
        assert (raised.type, initialized) == ("RuntimeError", False)
        first, *_ = raised.text.splitlines()
        told = "" if rank == bad else f"rank {bad} failed in `init`: RuntimeError: "
        assert first == f"{told}no route to host"
        assert raised.cause == (CLOSED if others_see_it and rank != bad else "None")


# --- cores


def join_bound(bound):
    rank = int(os.environ["RANK"])
    if bound:
        os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[rank]])
    with init():
        return group_state().cpu_sharers


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="binds two ranks to a core each",
)
@pytest.mark.parametrize("bound", [True, False])
def test_ranks_notice_whether_each_is_bound_to_cores_of_its_own(bound):
    assert launched(join_bound, bound, size=2) == [1 if bound else 2] * 2


# --- nodes


def join_from_loopback(hosts):
    name, address = hosts[int(os.environ["RANK"])], "127.0.1.1"
    with (
        patch.object(socket, "gethostname", lambda: name),
        patch.object(socket, "gethostbyname", lambda _: address),
    ):
        return caught(lambda: init(timeout=SOON))


def test_a_host_name_that_is_loopback_raises_and_names_the_variable():
    for raised in launched(join_from_loopback, ["a", "b"], size=2):
        assert raised.type == "RuntimeError"
        assert "\n  rank 0: a is 127.0.1.1\n  rank 1: b is 127.0.1.1\n" in raised.text
        assert "Set GLOO_SOCKET_IFNAME" in raised.text


def two_on_each_host(rank, size, port):
    """Return Open MPI's variables, which say nothing about the number of nodes."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    numbers = zip(names, (rank, size, rank % 2, 2), strict=True)
    env = {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers}
    return env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def join_from(hosts):
    name = hosts[int(os.environ["OMPI_COMM_WORLD_RANK"])]
    with patch.object(socket, "gethostname", lambda: name), init() as here:
        return here.node_rank, here.num_nodes, here.local_rank, here.launcher


def test_under_mpi_the_nodes_are_counted_by_the_names_of_the_hosts():
    outcomes = launched(join_from, ["b", "b", "a", "a"], size=4, variables=two_on_each_host)
    assert outcomes == [(rank // 2, 2, rank % 2, "mpi") for rank in range(4)]


# --- whose run it is


def of_two_runs(rank, size, port, **changes):
    # Of jobs 10,000 apart with the same step, whose default port would be the same.
    return slurm_variables(rank, size, port, SLURM_JOB_ID=str(123456 + 10000 * rank), **changes)


def join_as_one_of_two_runs():
    # The other one raises as soon as it has read whose store it is.
    patience = SOON if os.environ["SLURM_PROCID"] == "0" else LONG
    try:
        with init(timeout=patience):
            pass
    except RuntimeError:
        assert not tcp_store._opened  # a second try would meet the other run's again
        raise


def test_a_rank_of_another_run_raises_and_names_both_runs():
    first, second = launched(join_as_one_of_two_runs, size=2, variables=of_two_runs)
    assert str(first).startswith(
        "TimeoutError: `init` must be reached by every rank, but rank 1 of 2 did not"
    )
    assert second.type == "RuntimeError"
    assert second.seconds < 30
    assert re.fullmatch(
        r"localhost:\d+ is the store of SLURM job 123456, step 0, .*, not SLURM job 133456, "
        r"step 0, .*: set a free MASTER_PORT",
        second.text,
    )
