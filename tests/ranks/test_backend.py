"""Which device the tensors of a collective take."""

import pytest
import torch

from pardata.ranks._backend import device_of_counts, device_of_sums, runs_on_gpus

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("backend", "device", "of_sums", "of_counts"),
    [
        (None, CPU, CPU, CPU),
        (None, GPU, CPU, CPU),  # a single process has nobody to send to
        ("gloo", CPU, CPU, CPU),
        ("gloo", GPU, CPU, CPU),
        ("nccl", GPU, GPU, GPU),
        ("cuda:nccl,cpu:gloo", GPU, GPU, CPU),
    ],
)
def test_sums_stay_on_the_gpu_and_small_integers_off_it_wherever_the_group_can(
    backend, device, of_sums, of_counts
):
    assert device_of_sums(backend, device) == of_sums
    assert device_of_counts(backend, device) == of_counts
    assert runs_on_gpus(backend) == (of_sums == GPU)
