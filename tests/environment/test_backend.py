"""Which tensors a backend takes, and how its groups end."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import run

from pardata.environment._backend import (
    has_accelerator_backend,
    new_gloo_group,
    supports_device,
)

BACKENDS = [
    (None, False, "cpu"),  # a single process has nobody to send to
    ("gloo", False, "cpu cuda"),
    ("nccl", True, "cuda"),
    ("cuda:nccl,cpu:gloo", True, "cpu cuda"),
    ("cpu:gloo,xpu:gloo", False, "cpu xpu"),  # so was it asked for
    ("cuda:not-yet-imported,cpu:gloo", False, "cpu cuda"),
]


@pytest.mark.parametrize(("backend", "on_accelerators", "takes_these"), BACKENDS)
def test_what_a_backend_takes_is_what_it_was_made_for_or_what_torch_says_of_it(
    backend, on_accelerators, takes_these
):
    assert has_accelerator_backend(backend) is on_accelerators
    assert [kind for kind in ("cpu", "cuda", "xpu", "mps") if supports_device(backend, kind)] == (
        takes_these.split() if backend else ["cpu", "cuda"]
    )


def group_beside_one_that_is_bound():
    """Make a group beside one that is bound to a device for which it alone has a backend."""
    whole, kind = dist.group.WORLD, dist.ProcessGroup.BackendType.GLOO
    whole._register_backend(torch.device("xpu"), kind, whole._get_backend(torch.device("cpu")))
    whole.bound_device_id = torch.device("xpu", 0)
    numbers = torch.ones(2)
    dist.all_reduce(numbers, group=new_gloo_group())
    whole.bound_device_id = None
    return numbers.tolist()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gloo_is_there_beside_a_group_bound_to_a_device_that_it_does_not_know(size):
    assert run(group_beside_one_that_is_bound, world_size=size, fresh=True) == [[size, size]] * size


def meet_and_part(path, rounds):
    """End a group again and again just when gloo's thread drops a tensor that Python has left."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(path, size)
    for number in range(rounds):
        dist.destroy_process_group()
        part = dist.PrefixStore(str(number), store)
        dist.init_process_group("gloo", store=part, rank=rank, world_size=size)
        dist.all_reduce(torch.ones(1), async_op=True).wait()


@pytest.mark.oldest
def test_a_group_ends_while_gloo_drops_its_last_tensor(tmp_path):
    # Before torch 2.8 it hung, mostly within 20 rounds: https://github.com/pytorch/pytorch/pull/154976
    run(meet_and_part, str(tmp_path / "store"), 40, world_size=2, fresh=True, timeout=60)
