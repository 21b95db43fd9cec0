"""A sum of leaves in the order of a fixed binary tree, within a rank and between ranks.

A leaf is a vector of one microbatch, for example a gradient. The shape of the tree depends only on
the number of microbatches: a node is the sum of its two halves. So the bits do not depend on the
ranks. A rank sums its range of leaves to complete subtrees. Between ranks, the sums of these are
added in the order of the tree.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.environment._world import world

_T = TypeVar("_T")

# A half-open range of leaves.
Span: TypeAlias = tuple[int, int]

# `all_gather_into_tensor` can go with torch 2.14, in which it warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# The additive identity: x + -0.0 has the bits of x for every x, but -0.0 + 0.0 is 0.0.
IDENTITY = -0.0


class TreeStack(Generic[_T]):
    """Sums values from left to right; adds two as soon as they are the halves of a node.

    Args:
        count: number of leaves of the tree.
        add: returns the sum of two values; may write to the left one.

    Attributes:
        subtrees: the remaining subtrees: their range of leaves and their sum.
    """

    def __init__(self, count: int, add: Callable[[_T, _T], _T]) -> None:
        self._nodes, self._add = _nodes(count), add
        self.subtrees: list[tuple[Span, _T]] = []

    def push(self, span: Span, value: _T) -> None:
        """Add the value of the next leaves, `span`."""
        start, high = span
        while self.subtrees and (self.subtrees[-1][0][0], high) in self._nodes:
            (start, _), left = self.subtrees.pop()
            value = self._add(left, value)
        self.subtrees.append(((start, high), value))

    def total(self) -> _T:
        """Return the sum of all leaves."""
        ((_, total),) = self.subtrees
        return total


@lru_cache
def _nodes(count: int) -> frozenset[Span]:
    """Return the range of leaves of each inner node of a tree with `count` leaves."""
    nodes, ahead = set[Span](), [(0, count)]
    while ahead:
        low, high = ahead.pop()
        if high - low > 1:
            nodes.add((low, high))
            middle = (low + high + 1) // 2
            ahead += [(low, middle), (middle, high)]
    return frozenset(nodes)


@lru_cache
def subtrees_by_rank(ranges: tuple[range, ...]) -> tuple[tuple[Span, ...], ...]:
    """Return for each rank the complete subtrees in its range of leaves.

    >>> subtrees_by_rank((range(3), range(3, 6))), subtrees_by_rank((range(1), range(1, 4)))
    ((((0, 3),), ((3, 6),)), (((0, 1),), ((1, 2), (2, 4))))
    """
    stacks = [TreeStack[None](ranges[-1].stop, lambda _left, _right: None) for _ in ranges]
    for leaves, stack in zip(ranges, stacks, strict=True):
        for number in leaves:
            stack.push((number, number + 1), None)
    return tuple(tuple(span for span, _ in stack.subtrees) for stack in stacks)


class TreeLayout:
    """The layout of a tree sum over ranks, whose microbatches are in `ranges`.

    Each element of a vector has an owner. All ranks send it their subtree sums (all-to-all), it
    adds these in the order of the tree, and all gather the result. On two ranks with one subtree
    each, an all-reduce is the same sum.

    Attributes:
        spans: the range of leaves of each subtree of all ranks, in rank order.
        counts: number of subtrees of each rank.
        local_count: number of subtrees of this rank.
        first: the index of this rank's first subtree in `spans`.
        is_plain: whether to use an all-reduce.
    """

    def __init__(self, ranges: tuple[range, ...]) -> None:
        current = world()
        self.count, self.size = ranges[-1].stop, current.size
        subtrees = subtrees_by_rank(ranges)
        self.spans = [span for spans in subtrees for span in spans]
        self.counts = list(map(len, subtrees))
        self.local_count, self.first = self.counts[current.rank], sum(self.counts[: current.rank])
        # Not on accelerators, whose all-reduce may add in a network switch, or flush denormals.
        self.is_plain = current.size == 2 and max(self.counts) == 1 and current.device.type == "cpu"

    def rows(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor for this rank's subtree sums, of shape (max(1, n), padded).

        The length is padded to a multiple of the world size, because all ranks own equally many
        elements.
        """
        padded = -(-max(length, 1) // self.size) * self.size
        rows = torch.empty(max(1, self.local_count), padded, dtype=dtype, device=device)
        rows[:, length:] = IDENTITY
        return rows

    def total(self, sums: Iterable[Tensor]) -> Tensor:
        """Return the tree sum of all ranks' subtree sums, in rank order; it may overwrite them."""
        stack = TreeStack[Tensor](self.count, Tensor.add_)
        for span, value in zip(self.spans, sums, strict=True):
            stack.push(span, value)
        return stack.total()


class TreeAllReduce:
    """A tree sum in progress. Collective: all ranks make one, call `add`, then `result`.

    Args:
        layout: the layout of the step.
        rows: from `TreeLayout.rows`, of shape (rows, padded); they are overwritten.
    """

    def __init__(self, layout: TreeLayout, rows: Tensor) -> None:
        self._layout = layout
        self._length = rows.shape[1]
        # The result overwrites the only row, if there is one.
        self._sums = rows[0] if layout.local_count < 2 else None
        self._work: Any = None
        if layout.is_plain:
            self._work = dist.all_reduce(rows[0], async_op=True)
        elif layout.size > 1:
            self._send(rows[: layout.local_count])

    def _send(self, rows: Tensor) -> None:
        """Send each owner its chunk of each row, of shape (rows, chunk)."""
        how, chunk = self._layout, self._length // self._layout.size
        self._received = rows.new_empty(len(how.spans), chunk)
        self._sent = rows.view(how.local_count, how.size, chunk).transpose(0, 1).reshape(-1)
        counts = [n * chunk for n in how.counts], [how.local_count * chunk] * how.size
        received = self._received.view(-1)
        self._work = dist.all_to_all_single(received, self._sent, *counts, async_op=True)

    def add(self) -> None:
        """Sum the elements that this rank owns, and start the all-gather. Collective."""
        if self._layout.size == 1 or self._layout.is_plain:
            return
        self._work.wait()
        owned = self._layout.total(self._received)
        if self._sums is None:
            self._sums = owned.new_empty(self._length)
        self._work = _all_gather(self._sums, owned, async_op=True)
        del self._received, self._sent

    def result(self) -> Tensor:
        """Wait for the sums and return them, of shape (padded,)."""
        if self._work is not None:
            self._work.wait()
        assert self._sums is not None  # noqa: S101  # `add` has set it
        return self._sums
