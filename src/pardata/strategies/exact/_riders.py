"""What the ranks tell each other at the end of a step, behind the gradients that are sent last.

A small model's gradients take less time than another collective. Only on the CPU: who reads this
from a device waits for it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pardata.strategies.exact._fixed_tree import Stack
from pardata.strategies.exact._ordered_sum import Exchange

_MOST = 2**14  # numbers: more take longer than a collective of their own
_WORDS = 4  # a float64 is four words of 16 bits, and a float32 holds one exactly


class Heard(NamedTuple):
    """What all ranks have told.

    Attributes:
        has_failed: whether one has failed.
        used: which parameters have had a gradient on any rank.
        sums: of the rows of all ranks, in the order of the tree.
    """

    has_failed: bool
    used: list[bool]
    sums: Tensor


class Riders:
    """Whether a rank has failed, which parameters it used, and its rows of means.

    Each row has a place of its own, as words to which the other ranks add zeros: so no sum rounds.

    Args:
        exchange: of the step.
        rows: of this rank, in float64.
        used: of this rank, for each parameter.
    """

    def __init__(self, exchange: Exchange, rows: Tensor, used: Sequence[bool]) -> None:
        self._exchange, self._rows, self._used = exchange, rows, used
        self._flags, self._width = 1 + len(used), rows.shape[1]
        self.length = self._flags + len(exchange.spans) * self._width * _WORDS

    def fit(self) -> bool:
        """Whether they are few, and each rank sends a sum that they can ride with."""
        how = self._exchange
        reaches = how.is_plain or min(how.counts) > 0
        return how.size > 1 and reaches and self._rows.is_cpu and self.length <= _MOST

    def told(self, *, failed: bool) -> Tensor:
        """Return what this rank tells, as numbers that are added to those of the others."""
        how = self._exchange
        places = torch.zeros(len(how.spans), self._width, dtype=torch.float64)
        places[how.first : how.first + how.own] = self._rows[: how.own]
        flags = torch.tensor([failed, *self._used], dtype=torch.float32)
        return torch.cat([flags, places.view(torch.int16).flatten().float()])

    def heard(self, told: Tensor) -> Heard:
        """Return what the sum of what all have told says."""
        failed, *used = (told[: self._flags] > 0).tolist()
        words = told[self._flags : self.length].to(torch.int16)
        rows = words.view(torch.float64).view(-1, self._width)
        stack = Stack[Tensor](self._exchange.count, Tensor.add_)
        for span, row in self._exchange.in_order(rows):
            stack.push(span, row)
        ((_, sums),) = stack.pieces
        assert sums is not None  # noqa: S101  # there is at least one microbatch
        return Heard(failed, used, sums)
