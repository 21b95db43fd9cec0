"""Which tensors a backend takes."""

import pytest

from pardata.ranks._backend import runs_on_gpus, takes_cpu_tensors


@pytest.mark.parametrize(
    ("backend", "on_gpus", "on_the_cpu"),
    [
        (None, False, True),  # a single process has nobody to send to
        ("gloo", False, True),
        ("nccl", True, False),
        ("cuda:nccl,cpu:gloo", True, True),
    ],
)
def test_only_nccl_runs_on_gpus_and_alone_it_takes_nothing_else(backend, on_gpus, on_the_cpu):
    assert (runs_on_gpus(backend), takes_cpu_tensors(backend)) == (on_gpus, on_the_cpu)
