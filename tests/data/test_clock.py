"""How long a loop waited, by a clock that moves only where the test says."""

import pytest

from pardata.data._clock import Clock


class FakeTime:
    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    time = FakeTime()
    monkeypatch.setattr("pardata.data._clock.time", time)
    return time


def test_what_is_added_is_the_waiting_and_the_rest_is_not(time):
    clock = Clock()
    time.now += 3
    clock.add(1, 8)
    time.now += 5
    clock.add(0.5, 4)
    assert clock.waited == 1.5
    assert clock.seconds() == 8
    assert clock.stats() == {
        "seconds": 8.0,
        "wait_seconds": 1.5,
        "wait_share": 1.5 / 8,
        "samples": 12,
        "samples_per_second": 1.5,
    }


def test_it_goes_on_until_it_is_stopped(time):
    clock = Clock()
    time.now += 2
    assert clock.seconds() == 2
    time.now += 2
    assert clock.seconds() == clock.stats()["seconds"] == 4
    clock.stop()
    time.now += 1000
    assert clock.seconds() == clock.stats()["seconds"] == 4


def test_before_any_time_has_passed_nothing_is_divided_by_zero(time):
    found = Clock().stats()
    assert found["seconds"] > 0
    assert [found[name] for name in ("wait_seconds", "wait_share", "samples")] == [0, 0, 0]
    assert found["samples_per_second"] == 0


def test_each_clock_starts_when_it_is_made(time):
    old = Clock()
    time.now += 5
    assert (old.seconds(), Clock().seconds()) == (5, 0)


def test_without_a_fake_it_reads_a_clock_that_goes_on():
    clock = Clock()
    before = clock.seconds()
    assert 0 <= before <= clock.seconds()
