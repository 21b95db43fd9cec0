"""Which tensors a backend takes, and a group of gloo beside another."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import run

from pardata.environment._device import has_accelerator_backend, new_gloo_group, supports_device

BACKENDS = [
    (None, False, "cpu"),  # a single process has nobody to send to
    ("gloo", False, "cpu cuda"),
    ("nccl", True, "cuda"),
    ("cuda:nccl,cpu:gloo", True, "cpu cuda"),
    ("cpu:gloo,xpu:gloo", False, "cpu xpu"),  # so was it asked for
    ("cuda:not-yet-imported,cpu:gloo", False, "cpu cuda"),
]


@pytest.mark.parametrize(("backend", "on_accelerators", "takes_these"), BACKENDS)
def test_supports_device_knows_the_devices_of_a_backend(backend, on_accelerators, takes_these):
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


def test_a_gloo_group_works_with_a_default_group_bound_elsewhere():
    assert run(group_beside_one_that_is_bound, world_size=2, fresh=True) == [[2, 2]] * 2
