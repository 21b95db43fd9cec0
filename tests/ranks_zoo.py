"""What the tests of messages between ranks share: ranks that are threads, and their line."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from on_ranks import caught


def seat(line, rank, size):
    """Return the line as this rank has it."""
    return replace(line, rank=rank, size=size)


def together(fn, size):
    """Call ``fn(rank)`` for all ranks at once, on threads, and return results or `Raised`."""
    start = threading.Barrier(size)

    def started(rank):
        start.wait()
        return caught(fn, rank)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(started, range(size)))
