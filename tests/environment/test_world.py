"""Which process am I: joining once, leaving cleanly, children, and what others made."""

import contextlib
import dataclasses
import os
import re
import signal
import socket
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from launched import launched, reserved_port, slurm_variables, torchrun_variables
from logged import log_of
from on_ranks import caught, run_caught
from pretended import accelerators
from torch import nn
from torch.utils.data import TensorDataset

import pardata
from pardata import World, all_reduce_sum, barrier, init, rank_zero_first, world
from pardata.environment._world import Process, group_state

LAUNCHERS = {"torchrun": torchrun_variables, "slurm": slurm_variables}


# --- a single process


def test_an_unlaunched_process_is_an_immutable_world_of_one():
    here = world()
    assert here == World(0, 1, 0, 1, 0, 1, here.device, None, "single")
    assert not dist.is_initialized()
    assert repr(here).startswith("World(rank=0, size=1, local_rank=0, local_size=1, node_rank=0,")
    with pytest.raises(dataclasses.FrozenInstanceError):
        here.rank = 1


def test_init_in_a_single_process_joins_and_leaves_a_group():
    with init(tune_cpu=False) as here:
        assert (here.rank, here.size, here.launcher) == (0, 1, "single")
        assert here.backend is not None
        assert world() == here
        assert dist.get_world_size() == 1
        assert all_reduce_sum(3) == 3
    assert not dist.is_initialized()
    assert world().backend is None
    assert "PARDATA_JOINED" not in os.environ


# --- joining


def join_and_describe():
    with init() as here, log_of() as log:
        inside = dataclasses.astuple(here)[:6], here.launcher, here.backend, str(here.device)
        total = all_reduce_sum(here.rank)
        same = world() == here and not log.lines  # no warning
        barrier("end")
    return inside, total, same, world().launcher, dist.is_initialized()


def join_three_times():
    os.environ["PARDATA_JOINED"] = "1 torchrun:0/2@127.0.0.1:1"  # of another run: does not matter
    return [join_and_describe() for _ in range(3)]


@pytest.mark.parametrize(("launcher", "size"), [("torchrun", 1), ("torchrun", 4), ("slurm", 3)])
def test_every_rank_of_a_launcher_joins_leaves_and_joins_again(launcher, size):
    outcomes = launched(join_three_times, size=size, variables=LAUNCHERS[launcher])
    for rank, found in enumerate(outcomes):
        inside = (rank, size, rank, size, 0, 1), launcher, "gloo", "cpu"
        assert found == [(inside, sum(range(size)), True, "single", False)] * 3


def join_repeatedly():
    first = init()
    with init() as second:
        third = init(backend="gloo", device="cpu", timeout=timedelta(minutes=30))
    # Neither of them was the first: the group is still there.
    return first == second == third, all_reduce_sum(1)


def test_init_again_changes_nothing_and_only_the_first_leaves():
    assert launched(join_repeatedly, size=2) == [(True, 2)] * 2


OTHER_ARGUMENTS = [
    ({"device": "meta"}, "device", "cpu", "meta"),
    ({"device": "cpu", "backend": "nccl"}, "backend", "gloo", "nccl"),
    ({"timeout": 5}, "timeout", "0:01:40", "0:00:05"),
    ({"hang_after": 7}, "hang_after", "0:01:00", "0:00:07"),
]


def join_then_ask_otherwise():
    with init(timeout=100):
        init(timeout=100, hang_after=60, device="cpu")  # what it has
        return [caught(lambda: init(**a)) for a, *_ in OTHER_ARGUMENTS], all_reduce_sum(1)  # noqa: B023  # called at once


def test_init_again_with_other_arguments_is_refused():
    for found, total in launched(join_then_ask_otherwise, size=2):
        for raised, (_, name, had, asked) in zip(found, OTHER_ARGUMENTS, strict=True):
            assert str(raised) == (
                f"RuntimeError: `{name}` must be '{had}', as in the first init(), not '{asked}'"
            )
        assert total == 2


def raise_inside():
    message = "the reason"
    try:
        with init():
            raise ValueError(message)
    except ValueError:
        return dist.is_initialized(), all_reduce_sum(1)


def test_an_exception_that_unwinds_leaves_the_group_alone():
    assert launched(raise_inside, size=2) == [(True, 2)] * 2


def destroy_oneself():
    with init() as here:
        dist.destroy_process_group()
        gone = world().launcher
    return here.size, gone, world().launcher, group_state()


def test_a_group_that_the_user_destroys_is_gone_and_leaving_does_nothing():
    assert launched(destroy_oneself, size=2) == [(2, "single", "single", None)] * 2


# --- a group that somebody else made


def adopt(device):
    before = world().device
    with init(device=device) as here:
        same = init() == here == world()
    devices = str(before), str(here.device)
    return same, here.launcher, devices, dist.is_initialized(), all_reduce_sum(1)


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_group_that_exists_is_adopted_with_any_device_and_never_left(device):
    expected = True, "existing", ("cpu", device or "cpu"), True, 2
    assert run_caught(adopt, device, world_size=2) == [expected] * 2


def describe_with(hosts, env):
    rank = dist.get_rank()
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update({name: values[rank] for name, values in env.items()})
    if hosts:
        with patch.object(socket, "gethostname", lambda: hosts[rank]):
            init()
        with rank_zero_first(local=True):
            pass
    return dataclasses.astuple(world())[:6]


DESCRIBED = {
    "nothing": ("", {}, [(rank, 4, rank, 4, 0, 1) for rank in range(4)]),
    "Ray": (
        "",
        {"LOCAL_RANK": "0101", "LOCAL_WORLD_SIZE": "2222", "NODE_RANK": "1100"},
        [(rank, 4, rank % 2, 2, rank // 2, 2) for rank in range(4)],
    ),
    "Ray, on nodes of several sizes": (
        "aaab",
        {"LOCAL_RANK": "0120", "LOCAL_WORLD_SIZE": "3331"},
        [(0, 4, 0, 3, 0, 2), (1, 4, 1, 3, 0, 2), (2, 4, 2, 3, 0, 2), (3, 4, 0, 1, 1, 2)],
    ),
    "who adopts asks for the hosts": (
        "aaab",
        {},
        [(0, 4, 0, 3, 0, 2), (1, 4, 1, 3, 0, 2), (2, 4, 2, 3, 0, 2), (3, 4, 0, 1, 1, 2)],
    ),
}


@pytest.mark.parametrize("case", DESCRIBED)
def test_nodes_come_from_the_environment_or_from_the_hosts(case):
    hosts, env, expected = DESCRIBED[case]
    assert run_caught(describe_with, hosts, env, world_size=4) == expected


@contextlib.contextmanager
def gpus_of_a_group(bound=None, current=0, count=4, backend="cuda:nccl,cpu:gloo"):
    """Let the group say that it is one of GPUs, bound to one or not; note which is made current.

    There is no other way to have such a group without a GPU.
    """
    dist.group.WORLD.bound_device_id = bound
    with (
        patch.object(dist, "get_backend_config", lambda: backend),
        accelerators(count, current=current) as made_current,
    ):
        yield made_current
    dist.group.WORLD.bound_device_id = None


def adopt_gpus(chosen, local_rank, options):
    os.environ["LOCAL_RANK"] = str(local_rank)
    with gpus_of_a_group(**options) as made_current:
        here = init(device=chosen)
        return str(here.device), [str(device) for device in made_current]


GPUS = [
    ({"bound": torch.device("cuda", 3), "current": 2}, None, "cuda:3"),
    ({"current": 2}, None, "cuda:2"),
    ({}, None, "cuda:1"),  # nobody has chosen one: the local rank's
    ({"count": 1}, None, "cuda:0"),  # … which is the only one that it sees
    ({"current": 2}, "cuda:3", "cuda:3"),
]


@pytest.mark.parametrize(("options", "chosen", "device"), GPUS, ids=str)
def test_the_gpu_of_an_adopted_group_is_made_current(options, chosen, device):
    (found,) = run_caught(adopt_gpus, chosen, 1, options, world_size=1)
    assert found == (device, [device])


def adopt_what_is_not_there(kinds):
    return caught(lambda: init(device=kinds[dist.get_rank()]))


def test_a_group_is_not_adopted_with_an_accelerator_that_is_not_here():
    first, second = run_caught(adopt_what_is_not_there, [None, "cuda:7"], world_size=2)
    text = "RuntimeError: `device` must be one that this machine has, but is 'cuda:7': "
    assert str(second).startswith(text)
    assert f"rank 1 failed in `init`: {text}" in first.text


def vote_beside_nccl():
    asked = []
    reduce = dist.all_reduce

    def all_reduce(tensor, *args, group=None, **kwargs):
        asked.append((tensor.device.type, dist.get_backend(group)))
        return reduce(tensor, *args, group=group, **kwargs)

    with gpus_of_a_group(backend="cuda:nccl"), patch.object(dist, "all_reduce", all_reduce):
        here = init()
        assert (here.backend, here.device.type) == ("nccl", "cuda")
        with pardata.StopSignal(signal.SIGUSR2) as stop:
            if here.rank == 1:
                signal.raise_signal(signal.SIGUSR2)
            heard = [stop.agreed() for _ in range(2)]
    return heard, asked


def test_small_numbers_travel_over_gloo_also_beside_a_group_of_nccl_alone():
    assert run_caught(vote_beside_nccl, world_size=2) == [([False, True], [("cpu", "gloo")])] * 2


@pytest.mark.parametrize(("kind", "chosen"), [("cuda", 2), ("xpu", 2), ("mps", 0)])
def test_a_process_that_is_alone_computes_on_the_accelerator_that_is_current(kind, chosen):
    for current, number in ((None, 0), (2, chosen)):
        with accelerators(3, current=current, kind=kind):
            assert world().device == torch.device(kind, number)


# --- a launcher, and init not called

NET, DATA = nn.Linear(2, 2), TensorDataset(torch.arange(8))


def ask_whether_to_stop():
    with pardata.StopSignal() as stop:
        stop.agreed()


NEED_A_GROUP = {
    "barrier": pardata.barrier,
    "rank_zero_first": lambda: pardata.rank_zero_first().__enter__(),
    "rank_zero_call": lambda: pardata.rank_zero_call(max, 1, 2),
    "all_reduce_mean": lambda: pardata.all_reduce_mean(1.0),
    "all_reduce_sum": lambda: pardata.all_reduce_sum({"a": 1}),
    "backward": lambda: pardata.backward(NET, lambda model, x: model(x).sum(), torch.ones(1, 2)),
    "all_reduce_max": lambda: pardata.all_reduce_max(1),
    "all_reduce_min": lambda: pardata.all_reduce_min(1),
    "all_gather": lambda: pardata.all_gather(torch.ones(1)),
    "broadcast": lambda: pardata.broadcast("text"),
    "make_loader": lambda: pardata.make_loader(DATA, 4),
    "wrap_model": lambda: pardata.wrap_model(NET),
    "wrap_model(strategy='ddp')": lambda: pardata.wrap_model(NET, "ddp"),
    "wrap_model(strategy='fsdp')": lambda: pardata.wrap_model(NET, "fsdp"),
    "check_in_sync": lambda: pardata.check_in_sync(NET),
    "seed_everything(per_rank=True)": lambda: pardata.seed_everything(1, per_rank=True),
    "cache_dataset": lambda: pardata.cache_dataset(DATA, "nowhere"),
    "MetricWriter": lambda: pardata.MetricWriter("nowhere").close(),
    "progress": lambda: pardata.progress([1]),
    "Checkpointer.save": lambda: pardata.Checkpointer("nowhere").save(1, best=0.5),
    "Checkpointer.restore": lambda: pardata.Checkpointer("nowhere").restore(model=NET),
    "Checkpointer.steps": lambda: pardata.Checkpointer("nowhere").steps(),
    "StopSignal.agreed": ask_whether_to_stop,
}
NEED_NONE = {
    "world": pardata.world,
    "get_logger": lambda: pardata.get_logger("x").info("x"),
    "unwrap": lambda: pardata.unwrap(NET),
    "fingerprint": lambda: pardata.fingerprint(NET),
    "seed_everything": lambda: pardata.seed_everything(1),
    "load_weights": lambda: pardata.load_weights(NET, NET.state_dict()),
}
# Itself, and what others return.
OTHERS = {"init", "World", "Loader", "Microbatches", "Restored", "CachedDataset", "LoadedKeys"}
OTHERS |= {"Mean", "Mixture", "Progress", "RankLogger"}


def test_every_public_function_is_in_one_of_the_two_lists():
    covered = {re.match(r"\w+", name)[0] for name in (*NEED_A_GROUP, *NEED_NONE)}
    assert covered | OTHERS == set(pardata.__all__)


@pytest.fixture
def launched_without_init(monkeypatch):
    for name, value in torchrun_variables(1, 2, 29511).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", NEED_A_GROUP)
def test_under_a_launcher_what_needs_the_group_raises_without_init(name, launched_without_init):
    what = name.split("(strategy")[0]
    with pytest.raises(RuntimeError) as raised:
        NEED_A_GROUP[name]()
    assert f"`{what}" in str(raised.value)
    assert (
        "needs the process group: torchrun started 2 processes, but `pardata.init()` was not "
        "called: call it first, or set PARDATA_LAUNCHER=none"
    ) in str(raised.value)
    assert not os.path.exists("nowhere")  # noqa: PTH110  # one line


@pytest.mark.parametrize("name", NEED_NONE)
def test_under_a_launcher_what_needs_no_group_works_without_init(name, launched_without_init):
    NEED_NONE[name]()
    assert not dist.is_initialized()


def asked(**variables):
    """Return what is logged where the world is asked for twice, as the first of two ranks."""
    with pytest.MonkeyPatch.context() as patched, log_of() as log:
        for name, value in (torchrun_variables(0, 2, 29511) | variables).items():
            patched.setenv(name, value)
        patched.setattr("pardata.environment._world.process", Process())
        assert (world().size, world().rank) == (1, 0)
        return log.lines


def test_under_a_launcher_world_warns_once_before_init():
    (line,) = asked()
    assert line.startswith(
        "[0/2] `world()` needs the process group: torchrun started 2 processes, but "
        "`pardata.init()` was not called: call it first, or set PARDATA_LAUNCHER=none; "
        "this process is rank 0 of 1"
    )
    for quiet in (
        {"PARDATA_LAUNCHER": "none"},
        {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        {"RANK": "1"},  # rank 0 says it
    ):
        assert asked(**quiet) == []
    with patch("pardata.environment._world.get_worker_info", object):
        assert asked() == []


@pytest.mark.parametrize("name", [name for name in NEED_A_GROUP if "strategy" not in name])
def test_with_pardata_launcher_none_everything_works_alone(
    name, launched_without_init, monkeypatch, tmp_path
):
    monkeypatch.setenv("PARDATA_LAUNCHER", "none")
    monkeypatch.chdir(tmp_path)
    NEED_A_GROUP[name]()


def test_with_pardata_launcher_none_init_makes_a_group_of_one(launched_without_init, monkeypatch):
    monkeypatch.setenv("PARDATA_LAUNCHER", "none")
    with init(tune_cpu=False) as here:
        assert (here.size, here.launcher) == (1, "single")
        model = pardata.wrap_model(nn.Linear(2, 2), "ddp")
        assert isinstance(model, nn.parallel.DistributedDataParallel)


def opt_out_beside_a_group():
    os.environ["PARDATA_LAUNCHER"] = "none"
    return world().size, init().size, world().launcher, all_reduce_sum(1), dist.is_initialized()


def test_with_pardata_launcher_none_a_group_of_others_is_never_touched():
    outcomes = run_caught(opt_out_beside_a_group, world_size=2)
    assert outcomes == [(1, 1, "single", 1, True)] * 2


# --- children


def test_a_data_loader_worker_that_was_spawned_is_alone_too(launched_without_init, monkeypatch):
    # It knows nothing of its parent's group, but inherits the launcher's variables.
    monkeypatch.setattr("pardata.environment._world.get_worker_info", object)
    here = init(timeout=timedelta(seconds=5))
    assert (world().size, here.size, world().launcher) == (1, 1, "single")
    barrier("in a worker")
    assert all_reduce_sum(3) == 3
    assert not dist.is_initialized()


# --- leaving at exit

# A rank falls through to the end of the script, so that it ends as any script does.
EXITING = """
import atexit, sys, time
import torch.distributed as dist
import pardata

ending = sys.argv[1]
if ending == "adopted before":
    atexit.register(lambda: print("left", not dist.is_initialized(), file=sys.stderr))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert pardata.init().launcher == "existing"
    dist.destroy_process_group()
here = pardata.init()
assert here.launcher == "slurm"
assert pardata.all_reduce_sum(1) == here.size
pardata.barrier()
time.sleep(0.3)  # all have left the barrier
if ending == "one by one":
    time.sleep(4 * here.rank)  # longer than a process takes to end, beside all others
"""
ENDINGS = [
    ("one by one", ""),  # rank 0 keeps the store open until the end
    ("adopted before", "left True\n"),
]


# Where it is gone: tests/process_group/test_shutdown.py; of an exception:
# test_uncaught_exceptions.py there.
@pytest.mark.parametrize(("ending", "says"), ENDINGS)
def test_ranks_leave_at_exit_without_a_word(ending, says, programs, tmp_path):
    outputs, ranks = [tmp_path / str(rank) for rank in range(2)], []
    with reserved_port() as port:
        for rank, output in enumerate(outputs):
            variables = slurm_variables(rank, 2, port)
            ranks.append(programs.start(EXITING, ending, output=output, **variables))
        assert [rank.wait() for rank in ranks] == [0, 0]
    assert [output.read_text() for output in outputs] == [says] * 2
