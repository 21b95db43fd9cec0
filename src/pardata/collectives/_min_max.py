"""A vote: a few whole numbers of every rank, of which all hear the least and the most.

Begun now and read later, so that nobody waits: sent in the background, on the CPU, so that reading
them stops no GPU.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from pardata.collectives._comm_errors import explained
from pardata.collectives._fingerprint import HEADER, refuse
from pardata.environment._world import World, way_of_counts

_MOST = dist.ReduceOp.MAX


class Vote:
    """What this rank says in a vote of all. Collective to make, and again to read.

    Args:
        here: this rank.
        call: the name of the call; ranks in other calls get an error.
        numbers: at most 31.
    """

    def __init__(self, here: World, call: str, numbers: Sequence[int]) -> None:
        self._here, self._call, self._count = here, call, len(numbers)
        # As long as a header: a rank that is in such a collective gets what it cannot read, too.
        said = [zlib.crc32(call.encode()), *numbers]
        said += [0] * (HEADER // 2 - len(said))
        # The most of a number turned round is the least of it.
        group, device = way_of_counts(here)
        self._numbers = torch.tensor([*said, *(-number for number in said)], device=device)
        self._work: Any = None
        if here.size > 1:
            self._work = dist.all_reduce(self._numbers, _MOST, group=group, async_op=True)

    def result(self) -> list[tuple[int, int]]:
        """Wait, and return of each number the least and the most that any rank said."""
        if self._work is not None:
            with explained(self._call):
                self._work.wait()
        most, turned = self._numbers.view(2, -1).tolist()
        (least, most), *found = zip([-number for number in turned], most, strict=True)
        if least != most:
            refuse(self._here, self._call, lambda: "a vote")
        return found[: self._count]
