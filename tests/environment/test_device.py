"""Which tensors a backend takes, and a group of gloo beside another."""

import pytest
import torch
import torch.distributed as dist
from on_ranks import run
from torch.nn.attention import SDPBackend, sdpa_kernel

from pardata.environment._device import (
    has_accelerator_backend,
    kernel_settings,
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


CUDA = torch.device("cuda")
KINDS = "flash", "mem_efficient", "cudnn"  # of attention, next to plain operators
MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn
SETTINGS = {
    "torch.backends.cuda.matmul.fp32_precision": (MATMUL, "tf32"),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (MATMUL, False),
    "torch.backends.cudnn.rnn.fp32_precision": (CUDNN.rnn, "ieee"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_chooses_kernels_of_cuda_is_recorded(name):
    owner, value = SETTINGS[name]
    attribute = name.rpartition(".")[2]
    old, before = getattr(owner, attribute), kernel_settings(CUDA)
    setattr(owner, attribute, value)
    try:
        now = kernel_settings(CUDA)
    finally:
        setattr(owner, attribute, old)
    assert [key for key in now if before[key] != now[key]] == [name]
    assert kernel_settings(CUDA) == before


def test_a_kernel_of_attention_that_is_off_is_recorded():
    before = kernel_settings(CUDA)
    with sdpa_kernel(SDPBackend.MATH):
        now = kernel_settings(CUDA)
    names = {f"torch.backends.cuda.{kind}_sdp_enabled" for kind in KINDS}
    assert {name for name in now if now[name] != before[name]} == names


def test_the_cpu_has_no_settings_of_cuda():
    assert kernel_settings(torch.device("cpu")) == {}
