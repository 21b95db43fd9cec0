"""Which tensors a backend takes, and how its groups end."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import run

from pardata.ranks._backend import backends, runs_on_gpus, sends_numbers_apart, takes_cpu_tensors

BACKENDS = [
    (None, False, True),  # a single process has nobody to send to
    ("gloo", False, True),
    ("nccl", True, False),
    ("cuda:nccl,cpu:gloo", True, True),
]


@pytest.mark.parametrize(("backend", "on_gpus", "on_the_cpu"), BACKENDS)
def test_only_nccl_runs_on_gpus_and_alone_it_takes_nothing_else(backend, on_gpus, on_the_cpu):
    assert (runs_on_gpus(backend), takes_cpu_tensors(backend)) == (on_gpus, on_the_cpu)


APART = [
    ("gloo", "cpu", False),
    ("gloo", "cuda:0", False),  # of two ranks that share it: gloo reduces its gradients too
    ("nccl", "cuda:0", False),  # takes no numbers on the CPU at all
    ("cuda:nccl,cpu:gloo", "cuda:0", True),
    ("cuda:nccl,cpu:gloo", "cpu", False),  # of a model on the CPU gloo reduces the gradients
]


@pytest.mark.parametrize(("backend", "device", "apart"), APART)
def test_numbers_travel_apart_from_gradients_only_where_nccl_sends_these(backend, device, apart):
    assert sends_numbers_apart(backend, torch.device(device)) is apart


def meet_and_part(path, rounds):
    """End a group again and again just when gloo's thread drops a tensor that Python has left."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(path, size)
    for number in range(rounds):
        held = backends()
        dist.destroy_process_group()
        held.clear()
        part = dist.PrefixStore(str(number), store)
        dist.init_process_group("gloo", store=part, rank=rank, world_size=size)
        dist.all_reduce(torch.ones(1), async_op=True).wait()


@pytest.mark.oldest
def test_a_group_ends_while_gloo_drops_its_last_tensor(tmp_path):
    # Without the backends torch 2.6 hangs, mostly within 20 rounds.
    run(meet_and_part, str(tmp_path / "store"), 40, world_size=2, fresh=True, timeout=60)
