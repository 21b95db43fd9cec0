"""What the tests of messages between ranks share: ranks that are threads, and their clients."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist
from on_ranks import caught

from pardata.store._client import StoreClient

LONG = timedelta(seconds=30)


def clients(size, store=None, timeout=LONG):
    """Return the client of each rank; several connections if `store` is a list."""
    store = store or dist.HashStore()
    stores = store if isinstance(store, list) else [store] * size
    return [StoreClient(one, timeout, rank, size) for rank, one in enumerate(stores)]


def together(fn, ranks):
    """Call ``fn(rank)`` for all ranks at once, on threads, and return results or `Raised`.

    Args:
        fn: gets each of `ranks`.
        ranks: a number of them, or what stands for them.
    """
    ranks = range(ranks) if isinstance(ranks, int) else ranks
    start = threading.Barrier(len(ranks))

    def started(rank):
        start.wait()
        return caught(fn, rank)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(started, ranks))
