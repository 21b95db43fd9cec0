"""Copies of what is on GPUs, for a checkpoint that is written meanwhile: finished when returned.

Nothing here can be shown on a CPU. Run with ``pytest -m gpu`` on a machine with a GPU.
"""

import pytest
import torch

from pardata.checkpoint._snapshot import Copies

pytestmark = pytest.mark.usefixtures("gpu")
SPIN = 100_000_000  # cycles: some 50 ms
LATE = 1_000_000


def finished_late(device, value):
    """Return numbers that are written after a while on the stream of now of `device`."""
    with torch.cuda.device(device):
        late = torch.zeros(LATE, device=device)
        torch.cuda.synchronize()
        torch.cuda._sleep(SPIN)
        return late.fill_(value)


def copied(tensor):
    copies = Copies()
    copy = copies.of(tensor)
    copies.wait()
    return copy


@pytest.mark.parametrize("number", range(max(1, torch.cuda.device_count())))
def test_a_copy_is_finished_whichever_gpu_is_the_current_one(number):
    copy = copied(finished_late(torch.device("cuda", number), 1.0))
    assert copy.is_pinned()
    assert copy.min() == 1


def test_so_it_is_on_a_stream_of_ones_own():
    with torch.cuda.stream(torch.cuda.Stream()):
        assert copied(finished_late(torch.device("cuda", 0), 2.0)).min() == 2


def test_without_waiting_it_would_not_be(monkeypatch):
    device = torch.device("cuda", 0)
    # Takes the memory and loads the kernels: either may wait for the GPU. The memory is used again,
    # with what was in it.
    copied(finished_late(device, 3.0))
    late = finished_late(device, 4.0)
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda _: None)
    assert copied(late).max() != 4
