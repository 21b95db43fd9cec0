"""The fixed tree in which what the microbatches of a step leave is added, whoever runs them.

Its leaves are the microbatches, and its shape depends on their number alone: a node is the sum of
its halves. So the last bit does not depend on who adds what. A rank adds what it can of its run of
leaves, and is left with whole subtrees. Between ranks the tree adds their sums.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, TypeAlias, TypeVar

from pardata.data._plan import share

_T = TypeVar("_T")

# The leaves from the first number up to the second.
Span: TypeAlias = tuple[int, int]


class Stack(Generic[_T]):
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
def subtrees_of(count: int, size: int) -> tuple[tuple[Span, ...], ...]:
    """Return, for each of `size` ranks, the subtrees that it is left with.

    >>> subtrees_of(6, 2), subtrees_of(4, 3)
    ((((0, 3),), ((3, 6),)), (((0, 2),), ((2, 3),), ((3, 4),)))
    """
    stacks = [Stack[None](count, lambda _left, _right: None) for _ in range(size)]
    for rank, stack in enumerate(stacks):
        for number in share(count, rank, size):
            stack.push((number, number + 1), None)
    return tuple(tuple(span for span, _ in stack.subtrees) for stack in stacks)
