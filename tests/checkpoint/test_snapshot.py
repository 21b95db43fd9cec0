"""Copies of what is on several GPUs, on a machine that has none."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pardata.checkpoint._snapshot import HostCopies


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_a_copy_waits_for_each_gpu_that_it_copies_from(monkeypatch):
    # Tensors that say they are on GPUs, and a note of what is waited for.
    # tests/gpu/test_snapshot_gpu.py has real ones.
    waited_for = []

    class Stream:
        def __init__(self, device):
            self.synchronize = lambda: waited_for.append(str(device))

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with FakeTensorMode():
        on_gpus = [torch.empty(size, device=f"cuda:{size % 2}") for size in range(1, 5)]
        copies = HostCopies()
        made = [copies.of(tensor) for tensor in (*on_gpus, torch.ones(2))]
        copies.wait()
    assert {copy.device.type for copy in made} == {"cpu"}
    assert sorted(waited_for) == ["cuda:0", "cuda:1"]
