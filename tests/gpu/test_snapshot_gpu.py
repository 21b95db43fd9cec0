"""Copies of what is on GPUs, for a checkpoint that is written meanwhile: finished when returned.

Nothing here can be shown on a CPU. Run with ``pytest -m gpu`` on a machine with a GPU, or with
``--device=sim``.
"""

import pytest
import torch
from common_gpu import SPIN, nothing_waits

from pardata.checkpoint._snapshot import HostCopies

pytestmark = pytest.mark.usefixtures("gpu")
LATE = 1_000_000


def finished_late(device, value):
    """Return numbers that are written after a while on the stream of now of `device`."""
    own = torch.get_device_module(device)
    with own.device(device):
        late = torch.zeros(LATE, device=device)
        own.synchronize()
        own._sleep(SPIN)
        return late.fill_(value)


def copied(tensor):
    copies = HostCopies()
    copy = copies.of(tensor)
    copies.wait()
    return copy


def test_a_copy_is_finished_whichever_gpu_is_the_current_one(hardware):
    for number in range(torch.get_device_module(hardware).device_count()):
        copy = copied(finished_late(torch.device(hardware, number), 1.0))
        assert copy.is_pinned()
        assert copy.min() == 1


def test_copies_are_queued_one_after_the_other_before_any_is_waited_for(gpu):
    late, copies = finished_late(torch.device(gpu), 5.0), HostCopies()
    with nothing_waits(gpu):
        made = [copies.of(part) for part in late.chunk(3)]
    copies.wait()
    assert [copy.min() for copy in made] == [5] * 3


def test_each_of_many_that_are_let_go_at_once_has_its_own(gpu):
    copies = HostCopies()
    made = [copies.of(torch.full((LATE,), float(n), device=gpu)) for n in range(4)]
    copies.wait()
    assert [(copy.min().item(), copy.max().item()) for copy in made] == [(n, n) for n in range(4)]
