"""Which device the tensors of a collective take."""

import pytest
import torch

from pardata.ranks._backend import device_of_sums, runs_on_gpus

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("backend", "device", "of_sums"),
    [
        (None, CPU, CPU),
        (None, GPU, CPU),  # a single process has nobody to send to
        ("gloo", CPU, CPU),
        ("gloo", GPU, CPU),
        ("nccl", GPU, GPU),
        ("cuda:nccl,cpu:gloo", GPU, GPU),
    ],
)
def test_sums_stay_on_the_gpu_where_the_group_has_it(backend, device, of_sums):
    assert device_of_sums(backend, device) == of_sums
    assert runs_on_gpus(backend) == (of_sums == GPU)
