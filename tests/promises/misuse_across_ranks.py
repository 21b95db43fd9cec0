"""What the rows of ``errors.md`` use that work across ranks, and that show or write."""

import tempfile
from types import SimpleNamespace

from pardata import MetricWriter, get_logger, progress, rank_zero_first


def cyclic():
    value = [1.0]
    value.append(value)
    return value


def first(work, **options):
    with rank_zero_first(**options):
        work()


def fails():
    raise OSError("no disk")


def written(step, values):
    """Write on all ranks; return after that."""
    with tempfile.TemporaryDirectory() as directory, MetricWriter(directory) as opened:
        opened.write(step, values)


def steps(*yielded):
    return iter(yielded)


bar, log, writer = progress([1]), get_logger("misuse"), SimpleNamespace(write=written)

LABELS = {
    "a list that holds itself": "all_reduce_mean(cyclic())",
    "to broadcast what cannot be pickled": "broadcast(threading.Lock())",
    "to gather what cannot be pickled": "all_gather(threading.Lock())",
    "a result that cannot be pickled": "rank_zero_call(threading.Lock)",
}
