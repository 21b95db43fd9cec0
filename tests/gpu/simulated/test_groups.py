"""Collectives: gloo's results, late as NCCL's, and no host wait."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the usual name
from on_ranks import run
from torch import nn

DEVICES = 2


def in_group(fn, backend, device, *args):
    """Call ``fn(rank, size, device, *args)`` in a group of a backend, in place of that of `run`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    torch.sim.set_device(rank % DEVICES)
    store = dist.PrefixStore(fn.__name__, store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device)
    try:
        return fn(rank, size, *args)
    finally:
        torch.sim.set_sync_debug_mode("default")
        torch.sim.synchronize()


def on_ranks(fn, *args, backend="sim:simccl,cpu:gloo", size=2, device=None):
    return run(in_group, fn, backend, device, *args, world_size=size, fresh=True)


def all_of_them(rank, size):
    def own(count=2):
        return torch.full((count,), float(rank + 1), device="sim")

    def empty(count=2):
        return torch.empty(count, device="sim")

    found = {name: own() for name in ("sum", "mean", "broadcast", "reduce")}
    dist.all_reduce(found["sum"])
    dist.all_reduce(found["mean"], dist.ReduceOp.AVG)
    dist.broadcast(found["broadcast"], 1)
    dist.reduce(found["reduce"], 0)
    found["gathered"] = [empty() for _ in range(size)]
    dist.all_gather(found["gathered"], own())
    found["in one"] = empty(2 * size)
    dist.all_gather_into_tensor(found["in one"], own())
    found["scattered sum"] = empty(1)
    dist.reduce_scatter_tensor(found["scattered sum"], own(size))
    found["all to all"] = empty(size)
    dist.all_to_all_single(found["all to all"], own(size))
    found["scattered"] = empty()
    dist.scatter(found["scattered"], [own() + n for n in range(size)] if rank == 0 else None, 0)
    found["at 0"] = [empty() for _ in range(size)] if rank == 0 else None
    dist.gather(own(), found["at 0"], 0)
    found["sent"] = own()
    dist.send(own(), 1) if rank == 0 else dist.recv(found["sent"], 0) if rank == 1 else None
    dist.barrier()
    return {name: _listed(value) for name, value in found.items()}


def _listed(value):
    return [part.tolist() for part in value] if isinstance(value, list) else (
        value if value is None else value.tolist()
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["sim:simccl,cpu:gloo", "simccl", "gloo"])
def test_each_collective_gives_what_gloo_gives(backend):
    first, second = on_ranks(all_of_them, backend=backend)
    for found in (first, second):
        assert (found["sum"], found["mean"], found["broadcast"]) == ([3, 3], [1.5, 1.5], [2, 2])
        assert (found["gathered"], found["in one"]) == ([[1, 1], [2, 2]], [1, 1, 2, 2])
        assert (found["scattered sum"], found["all to all"]) == ([3], [1, 2])
    assert (first["reduce"], first["at 0"]) == ([3, 3], [[1, 1], [2, 2]])
    assert (first["scattered"], second["scattered"]) == ([1, 1], [2, 2])
    assert (first["sent"], second["sent"]) == ([1, 1], [1, 1])


def read(rank, size, waits):
    values, other = torch.ones(3, device="sim"), torch.sim.Stream()
    torch.sim.synchronize()
    torch.sim.set_sync_debug_mode("error")
    work = dist.all_reduce(values, async_op=True)
    if waits:
        work.wait()
    seen = values.clone()
    torch.sim.set_sync_debug_mode("default")
    other.synchronize()
    result = seen.tolist()
    work.wait()
    return result, values.tolist()


@pytest.mark.parametrize("waits", [False, True])
def test_a_result_is_there_for_who_waits_and_the_host_does_not(waits):
    seen = [1 + waits] * 3
    assert on_ranks(read, waits) == [(seen, [2, 2, 2])] * 2


def test_gloo_stops_the_host_and_simccl_does_not():
    assert on_ranks(host_waits_of_wait) == [0, 0]
    assert on_ranks(host_waits_of_wait, backend="gloo") == [1, 1]


def host_waits_of_wait(rank, size):
    before = torch.sim.waits().get("Work.wait", 0)
    dist.all_reduce(torch.ones(3, device="sim"))
    return torch.sim.waits().get("Work.wait", 0) - before


def one_goes_on(rank, size):
    """Let rank 1 wait on the CPU for rank 0, which waits for the device's collective."""
    value = torch.ones(1, device="sim")
    dist.all_reduce(value)
    result = value.item() if rank == 0 else None
    told = torch.zeros(1)
    dist.all_reduce(told)
    return result or value.item()


def test_a_collective_ends_whatever_the_host_of_a_rank_does():
    assert on_ranks(one_goes_on) == [2, 2]


def other_orders(rank, size):
    """Begin two collectives of two groups, of which each rank's device comes to another first."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    values = torch.ones(2, device="sim")
    torch.sim.synchronize()
    for number in range(2):
        with torch.sim.stream(torch.sim.Stream()):
            torch.sim._sleep(10_000_000 if number == rank else 0)
            dist.all_reduce(values[number : number + 1], group=groups[number], async_op=True)
    torch.sim.synchronize()
    return values.tolist()


def test_collectives_of_two_groups_do_not_wait_for_each_other():
    assert on_ranks(other_orders) == [[2, 2]] * 2


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def trained(rank, size, how):
    torch.manual_seed(0)
    net = Net()
    if how == "synchronised batch norm":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    net = net.to("sim")
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(net)
    else:
        model = nn.parallel.DistributedDataParallel(net, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).chunk(size)[rank]
    targets = (torch.arange(8) % 3).chunk(size)[rank]
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(rows.to("sim")), targets.to("sim")).backward()
        optimizer.step()
    whole = [p.full_tensor() if how == "fsdp" else p for p in net.parameters()]
    statistics = net[1].running_mean.tolist()
    return [value.tolist() for value in whole], statistics


@pytest.mark.parametrize("how", ["ddp", "fsdp", "synchronised batch norm"])
def test_replicas_train_alike(how):
    (first, means), (second, others) = on_ranks(trained, how)
    assert first == second
    if how == "synchronised batch norm":
        ((_, expected),) = on_ranks(trained, how, size=1)
        torch.testing.assert_close(torch.tensor(means), torch.tensor(expected))
        assert means == others


def new_group_in_a_bound_group(rank, size):
    group = dist.new_group(backend="gloo")
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item(), dist.group.WORLD.bound_device_id == torch.device("sim", 0)


def test_gloo_has_a_place_in_a_group_that_is_bound_to_a_device():
    device = torch.device("sim:0")
    assert on_ranks(new_group_in_a_bound_group, device=device) == [(2, True)] * 2
