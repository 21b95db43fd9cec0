"""What the tests of messages between ranks share: ranks that are threads, and their places."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from on_ranks import caught


@dataclass
class Seat:
    """All that a turn needs to know of a rank."""

    rank: int
    size: int


def together(fn, size):
    """Call ``fn(rank)`` for all ranks at once, on threads, and return results or `Raised`."""
    start = threading.Barrier(size)

    def started(rank):
        start.wait()
        return caught(fn, rank)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(started, range(size)))
