"""Waiting for data is seen: the stats of the slowest rank, and one line after the first epoch."""

import logging
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from logged import log_of
from on_ranks import run
from torch.utils.data import Dataset

from pardata import make_loader


class FakeTime:
    """A clock that moves only where the test says."""

    now = 100.0

    def perf_counter(self):
        return self.now


class Slow(Dataset):
    """Takes `seconds` a sample, by a clock that is not the machine's."""

    def __init__(self, clock, seconds, length=5):
        self.clock, self.seconds, self.length = clock, seconds, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.clock.now += self.seconds
        return index


@contextmanager
def fake_time():
    clock = FakeTime()
    with patch("pardata.data._wait_timer.time", clock):
        yield clock


def loader_of(data, batch_size=1):
    # Not reproducible, so that no sample is read more than once.
    return make_loader(data, batch_size, num_workers=0, reproducible=False)


def epoch(loader, clock, seconds, steps=None):
    """Run an epoch whose loop takes `seconds` a step, and leave it after so many `steps`."""
    for step, _ in enumerate(loader, 1):
        clock.now += seconds
        if step == steps:
            break


def test_stats_tell_waiting_from_computing_of_each_epoch_anew():
    with fake_time() as clock:
        loader = loader_of(Slow(clock, 1))
        for _ in range(2):
            epoch(loader, clock, 3)
            clock.now += 1000  # an evaluation, say: no part of the epoch
            expected = {
                "seconds": 20.0,
                "wait_seconds": 5.0,
                "wait_share": 0.25,
                "samples": 5,
                "samples_per_second": 0.25,
                "imbalance": 1.0,
                "imbalance_by_number": 1.0,
            }
            assert loader.stats() == expected
        epoch(loader, clock, 3, steps=2)
        clock.now += 1000  # the clock of an epoch that was left stands still
        assert (loader.stats()["seconds"], loader.stats()["samples"]) == (8.0, 2)


def test_stats_may_be_asked_for_at_any_time():
    with fake_time() as clock:
        loader = loader_of(Slow(clock, 2, 4), batch_size=2)
        found = [loader.stats(), *(loader.stats() for _ in loader)]
        waits = [(stats["wait_seconds"], stats["samples"]) for stats in found]
        assert waits == [(0, 0), (4, 2), (8, 4)]


# --- the line after the first epoch ---


@pytest.fixture
def log():
    with log_of("pardata.data._loader") as keeper:
        yield keeper


def _lines():
    with log_of("pardata.data._loader") as log, fake_time() as clock:
        loader = loader_of(Slow(clock, 3, 6), batch_size=3)
        epoch(loader, clock, 2)
        epoch(loader, clock, 2)
    return [(record.levelno, line) for record, line in zip(log.records, log.lines, strict=True)]


def test_a_long_wait_for_data_is_logged_once_on_rank_0():
    line = (
        "[0/3] the epoch waited 60% of its 10.0 s for data: raise num_workers, or use "
        "cache_dataset or batch_transform"
    )
    assert run(_lines, world_size=3) == [[(logging.WARNING, line)], [], []]


LONG_OR_NOT = [
    (3, 7, 1),  # 30 %: long
    (2.9, 7.1, 0),  # less: not long
    (0.2, 0, 1),  # a second in all
    (0.199, 0, 0),  # less: nobody waits, whatever share that is
]


@pytest.mark.parametrize(("wait", "work", "lines"), LONG_OR_NOT)
def test_it_speaks_from_so_many_percent_and_seconds_on(wait, work, lines, log):
    with fake_time() as clock:
        data = Slow(clock, wait)
        loader = loader_of(data)
        epoch(loader, clock, work)
        assert len(log.lines) == lines
        data.seconds = 10
        epoch(loader, clock, 1)
    assert len(log.lines) == 1


@pytest.mark.parametrize(("delivered", "left_after"), [(0, 4), (5, None)])
def test_incomplete_and_empty_epochs_log_no_wait_for_data(delivered, left_after, log):
    with fake_time() as clock:
        loader = loader_of(Slow(clock, 10))
        loader.load_state_dict({**loader.state_dict(), "delivered": delivered})
        epoch(loader, clock, 1, steps=left_after)
        assert log.lines == []
        epoch(loader, clock, 1)
        epoch(loader, clock, 1)
    assert len(log.lines) == 1
