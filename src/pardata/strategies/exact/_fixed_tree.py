"""The fixed tree in which what the microbatches of a step leave is added, whoever runs them.

Its leaves are the microbatches, and its shape depends on their number alone: a node is the sum of
its halves. So the last bit does not depend on who adds what. A rank adds what it can of its share
of leaves, and is left with whole subtrees. Between ranks the tree adds their sums.
"""

from collections.abc import Callable, Iterable
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
        pieces: the subtrees that are left: the leaves and the sum of each. The sum is None if the
            leaves left nothing.
    """

    def __init__(self, count: int, add: Callable[[_T, _T], _T]) -> None:
        self._nodes, self._add = _nodes(count), add
        self.pieces: list[tuple[Span, _T | None]] = []

    def push(self, span: Span, value: _T | None) -> None:
        """Add what follows on the right; nothing changes no bit of what it is added to."""
        while self.pieces and self._is_node(*self.pieces[-1][0], *span):
            (low, _), left = self.pieces.pop()
            span = low, span[1]
            if value is None or left is None:
                value = left if value is None else value
            else:
                value = self._add(left, value)
        self.pieces.append((span, value))

    def _is_node(self, low: int, middle: int, start: int, high: int) -> bool:
        return middle == start and (low, high) in self._nodes

    def values(self) -> list[_T | None]:
        """Return the sums alone."""
        return [value for _, value in self.pieces]


@lru_cache
def _nodes(count: int) -> frozenset[Span]:
    """Return the leaves of each sum in a tree of so many."""
    found, ahead = set[Span](), [(0, count)]
    while ahead:
        low, high = ahead.pop()
        if high - low > 1:
            found.add((low, high))
            middle = (low + high + 1) // 2
            ahead += [(low, middle), (middle, high)]
    return frozenset(found)


@lru_cache
def pieces_of(count: int, size: int, *, strided: bool = False) -> tuple[tuple[Span, ...], ...]:
    """Return, for each of `size` ranks, the subtrees that it is left with.

    >>> pieces_of(6, 2), pieces_of(4, 3)
    ((((0, 3),), ((3, 6),)), (((0, 2),), ((2, 3),), ((3, 4),)))
    """
    shares = (share(count, rank, size, strided=strided) for rank in range(size))
    return tuple(tuple(_merged(count, ((n, n + 1) for n in own))) for own in shares)


def _merged(count: int, spans: Iterable[Span]) -> list[Span]:
    stack = Stack[None](count, lambda _left, _right: None)
    for span in spans:
        stack.push(span, None)
    return [span for span, _ in stack.pieces]
