"""Collectives: gloo's results, late as NCCL's, and no host wait."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import run

DEVICES = 2


def in_group(fn, backend, *args):
    """Call ``fn(rank, size, *args)`` in a group of a backend, in place of that of `run`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    torch.sim.set_device(rank % DEVICES)
    store = dist.PrefixStore(fn.__name__, store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    try:
        return fn(rank, size, *args)
    finally:
        torch.sim.set_sync_debug_mode("default")
        torch.sim.synchronize()


def on_ranks(fn, *args, backend="sim:simccl,cpu:gloo"):
    return run(in_group, fn, backend, *args, world_size=2, fresh=True)


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
