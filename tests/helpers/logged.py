"""What was logged: a handler that keeps the records, and a logger of pardata's with one."""

import logging
from contextlib import contextmanager

from pardata import get_logger


class Keeper(logging.Handler):
    """Keeps the records that it is given."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)

    @property
    def lines(self):
        return [record.getMessage() for record in self.records]


def kept(name, level=logging.DEBUG):
    """Return a pardata logger called `name` and what keeps its records."""
    plain, keeper = logging.getLogger(name), Keeper()
    plain.setLevel(level)
    plain.handlers, plain.propagate = [keeper], False
    return get_logger(name), keeper


@contextmanager
def log_of(name="pardata", level=logging.NOTSET):
    """Give what keeps the records of a log."""
    plain, keeper = logging.getLogger(name), Keeper()
    plain.addHandler(keeper)
    plain.setLevel(level)
    yield keeper
    plain.removeHandler(keeper)
    plain.setLevel(logging.NOTSET)
