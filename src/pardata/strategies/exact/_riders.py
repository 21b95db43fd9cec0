"""What the ranks tell each other at the end of a step, behind the gradients that are sent last.

A small model's gradients take less time than another collective. Only on the CPU: who reads this
from a device waits for it.
"""

import torch
from torch import Tensor

from pardata.strategies.exact._ordered_sum import Exchange

_MOST = 2**14  # numbers: more take longer than a collective of their own
_WORDS = 4  # a float64 is four words of 16 bits, and a float32 holds one exactly


class Riders:
    """A rank's flags, and its rows of means, on the way to all ranks.

    Each row has a place of its own, as words to which the other ranks add zeros: so no sum rounds.

    Args:
        exchange: of the step.
        rows: of this rank, in float64.
        flags: of this rank, as many as of each rank.
    """

    def __init__(self, exchange: Exchange, rows: Tensor, flags: list[bool]) -> None:
        self._exchange, self._rows, self._flags = exchange, rows, flags
        self._width = rows.shape[1]
        self._length = len(flags) + len(exchange.spans) * self._width * _WORDS

    def fit(self) -> bool:
        """Whether they are few, and each rank sends a sum that they can ride with."""
        how = self._exchange
        reaches = how.is_plain or min(how.counts) > 0
        return how.size > 1 and reaches and self._rows.is_cpu and self._length <= _MOST

    def sent(self) -> Tensor:
        """Return what this rank sends, as numbers that are added to those of the others."""
        how = self._exchange
        places = torch.zeros(len(how.spans), self._width, dtype=torch.float64)
        places[how.first : how.first + how.own] = self._rows[: how.own]
        flags = torch.tensor(self._flags, dtype=torch.float32)
        return torch.cat([flags, places.view(torch.int16).flatten().float()])

    def received(self, total: Tensor) -> tuple[list[bool], Tensor]:
        """Return which flags any rank has set, and the sums of rows in the order of the tree."""
        count = len(self._flags)
        flags: list[bool] = (total[:count] > 0).tolist()
        words = total[count : self._length].to(torch.int16)
        return flags, self._exchange.total(words.view(torch.float64).view(-1, self._width))
