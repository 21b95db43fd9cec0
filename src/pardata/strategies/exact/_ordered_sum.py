"""A sum over ranks in the order of the fixed tree."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.environment._world import world
from pardata.strategies.exact._fixed_tree import Stack, subtrees_of

# The second is the name until torch 2.14, where it warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# What is added in place of nothing: it changes no bit of any number, and 0.0 would: of -0.0.
NOTHING = -0.0


class Exchange:
    """How the ranks add up vectors in a step of `count` microbatches.

    One rank, its owner, adds each element: all ranks send it the sums of their subtrees, and it
    sends them the whole sum. Two ranks with a subtree each use an all-reduce, which is the same.

    Attributes:
        spans: the leaves of each subtree of all ranks, in rank order.
        counts: how many subtrees each rank has.
        own: how many this rank has.
        first: the place of the first of them among those of all ranks.
        is_plain: whether an all-reduce is the same.
    """

    def __init__(self, count: int) -> None:
        here = world()
        self.count, self.size = count, here.size
        subtrees = subtrees_of(count, here.size)
        self.spans = [span for spans in subtrees for span in spans]
        self.counts = list(map(len, subtrees))
        self.own, self.first = self.counts[here.rank], sum(self.counts[: here.rank])
        self.is_plain = here.size == 2 and max(self.counts) == 1

    def rows(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return room for the sums of this rank's subtrees, one row at least.

        It is longer than a vector, because each rank owns equally much.
        """
        padded = -(-max(length, 1) // self.size) * self.size
        rows = torch.empty(max(1, self.own), padded, dtype=dtype, device=device)
        rows[:, length:] = NOTHING
        return rows

    def total(self, sums: Iterable[Tensor]) -> Tensor:
        """Return what the tree makes of the sums of the subtrees of all ranks, in rank order."""
        stack = Stack[Tensor](self.count, Tensor.add_)
        for span, own in zip(self.spans, sums, strict=True):
            stack.push(span, own)
        return stack.total()


class OrderedSum:
    """A sum on its way: `add` it on each rank, and then take the `result`, in the same order.

    Args:
        exchange: of the step.
        rows: as it has given them; they are written to. Collective.
    """

    def __init__(self, exchange: Exchange, rows: Tensor) -> None:
        self._exchange = exchange
        self._length = rows.shape[1]
        # The memory of the sums: of the only row, so that it lies alike whatever there is to send.
        self._sums = rows[0] if exchange.own < 2 else None
        self._work: Any = None
        if exchange.is_plain:
            self._work = dist.all_reduce(rows[0], async_op=True)
        elif exchange.size > 1:
            self._send(rows[: exchange.own])

    def _send(self, rows: Tensor) -> None:
        """Send each owner its part of each sum."""
        how, chunk = self._exchange, self._length // self._exchange.size
        self._received = rows.new_empty(len(how.spans), chunk)
        self._sent = rows.view(how.own, how.size, chunk).transpose(0, 1).reshape(-1)
        counts = [n * chunk for n in how.counts], [how.own * chunk] * how.size
        received = self._received.view(-1)
        self._work = dist.all_to_all_single(received, self._sent, *counts, async_op=True)

    def add(self) -> None:
        """Add what this rank owns, and begin to send it to the others. Collective."""
        if self._exchange.size == 1 or self._exchange.is_plain:
            return
        self._work.wait()
        owned = self._exchange.total(self._received)
        if self._sums is None:
            self._sums = owned.new_empty(self._length)
        self._work = _all_gather(self._sums, owned, async_op=True)
        del self._received, self._sent

    def result(self) -> Tensor:
        """Return the sums, as soon as they are there."""
        if self._work is not None:
            self._work.wait()
        assert self._sums is not None  # noqa: S101  # it was added
        return self._sums
