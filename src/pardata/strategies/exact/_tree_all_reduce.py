"""A sum over ranks in the order of the fixed tree.

In that tree is added what the microbatches of a step leave, whoever runs them. Its leaves are the
microbatches, and its shape depends on their number alone: a node is the sum of its halves. So the
last bit does not depend on who adds what. A rank adds what it can of its run of leaves, and is left
with whole subtrees. Between ranks the tree adds their sums.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.data._plan import local_range
from pardata.environment._world import world

_T = TypeVar("_T")

# The leaves from the first number up to the second.
Span: TypeAlias = tuple[int, int]

# The second is the name until torch 2.14, where it warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# What is added in place of nothing: it changes no bit of any number, and 0.0 would: of -0.0.
IDENTITY = -0.0


class TreeStack(Generic[_T]):
    """Adds what comes from left to right, as soon as two are the halves of a node.

    Args:
        count: the leaves of the tree.
        add: returns the sum of the two, in the memory of the left one if it likes.

    Attributes:
        subtrees: those that are left: the leaves and the sum of each. The sum is None if the
            leaves left nothing.
    """

    def __init__(self, count: int, add: Callable[[_T, _T], _T]) -> None:
        self._nodes, self._add = _nodes(count), add
        self.subtrees: list[tuple[Span, _T | None]] = []

    def push(self, span: Span, value: _T | None) -> None:
        """Add what follows on the right; nothing changes no bit of what it is added to."""
        start, high = span
        while self.subtrees and (self.subtrees[-1][0][0], high) in self._nodes:
            (start, _), left = self.subtrees.pop()
            if left is not None:
                value = left if value is None else self._add(left, value)
        self.subtrees.append(((start, high), value))

    def total(self) -> _T:
        """Return the sum of all leaves, of which at least one has left something."""
        ((_, total),) = self.subtrees
        assert total is not None  # noqa: S101  # see above
        return total


@lru_cache
def _nodes(count: int) -> frozenset[Span]:
    """Return the leaves of each sum in a tree of so many."""
    nodes, ahead = set[Span](), [(0, count)]
    while ahead:
        low, high = ahead.pop()
        if high - low > 1:
            nodes.add((low, high))
            middle = (low + high + 1) // 2
            ahead += [(low, middle), (middle, high)]
    return frozenset(nodes)


@lru_cache
def subtrees_by_rank(count: int, size: int) -> tuple[tuple[Span, ...], ...]:
    """Return, for each of `size` ranks, the subtrees that it is left with.

    >>> subtrees_by_rank(6, 2), subtrees_by_rank(4, 3)
    ((((0, 3),), ((3, 6),)), (((0, 2),), ((2, 3),), ((3, 4),)))
    """
    stacks = [TreeStack[None](count, lambda _left, _right: None) for _ in range(size)]
    for rank, stack in enumerate(stacks):
        for number in local_range(count, rank, size):
            stack.push((number, number + 1), None)
    return tuple(tuple(span for span, _ in stack.subtrees) for stack in stacks)


class TreeLayout:
    """How the ranks add up vectors in a step of `count` microbatches.

    One rank, its owner, adds each element: all ranks send it the sums of their subtrees, and it
    sends them the whole sum. Two ranks with a subtree each use an all-reduce, which is the same.

    Attributes:
        spans: the leaves of each subtree of all ranks, in rank order.
        counts: how many subtrees each rank has.
        local_count: how many this rank has.
        first: the place of the first of them among those of all ranks.
        is_plain: whether an all-reduce is the same.
    """

    def __init__(self, count: int) -> None:
        current = world()
        self.count, self.size = count, current.size
        subtrees = subtrees_by_rank(count, current.size)
        self.spans = [span for spans in subtrees for span in spans]
        self.counts = list(map(len, subtrees))
        self.local_count, self.first = self.counts[current.rank], sum(self.counts[: current.rank])
        # The all-reduce of an accelerator may add in a switch, or without the smallest numbers.
        self.is_plain = current.size == 2 and max(self.counts) == 1 and current.device.type == "cpu"

    def rows(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return room for the sums of this rank's subtrees, one row at least.

        It is longer than a vector, because each rank owns equally much.
        """
        padded = -(-max(length, 1) // self.size) * self.size
        rows = torch.empty(max(1, self.local_count), padded, dtype=dtype, device=device)
        rows[:, length:] = IDENTITY
        return rows

    def total(self, sums: Iterable[Tensor]) -> Tensor:
        """Return what the tree makes of the sums of the subtrees of all ranks, in rank order."""
        stack = TreeStack[Tensor](self.count, Tensor.add_)
        for span, value in zip(self.spans, sums, strict=True):
            stack.push(span, value)
        return stack.total()


class TreeAllReduce:
    """A sum on its way: `add` it on each rank, and then take the `result`, in the same order.

    Args:
        exchange: of the step.
        rows: as it has given them; they are written to. Collective.
    """

    def __init__(self, exchange: TreeLayout, rows: Tensor) -> None:
        self._exchange = exchange
        self._length = rows.shape[1]
        # The memory of the sums: of the only row, so that it lies alike whatever there is to send.
        self._sums = rows[0] if exchange.local_count < 2 else None
        self._work: Any = None
        if exchange.is_plain:
            self._work = dist.all_reduce(rows[0], async_op=True)
        elif exchange.size > 1:
            self._send(rows[: exchange.local_count])

    def _send(self, rows: Tensor) -> None:
        """Send each owner its part of each sum."""
        how, chunk = self._exchange, self._length // self._exchange.size
        self._received = rows.new_empty(len(how.spans), chunk)
        self._sent = rows.view(how.local_count, how.size, chunk).transpose(0, 1).reshape(-1)
        counts = [n * chunk for n in how.counts], [how.local_count * chunk] * how.size
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
