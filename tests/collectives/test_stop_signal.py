"""A signal on any rank stops all of them at the same step."""

import os
import signal
import threading
import time
from unittest.mock import patch

import pytest
from on_ranks import caught, run

from pardata import StopSignal, all_reduce_sum, barrier, world

AT_ONCE = patch("pardata.collectives._stop_signal._REPEATED_WITHIN", 0)  # leave the block


def stopped_at(asked, name):
    """Return the step at which this rank stops, where ranks are asked at steps of `asked`."""
    with StopSignal() as stop:
        for step in range(20):
            if asked.get(world().rank) == step:
                os.kill(os.getpid(), getattr(signal, name))
            all_reduce_sum(1)  # what else goes on
            if stop.agreed():
                assert stop.agreed()  # and it stays so, on every rank
                return step, stop.requested
    return None, stop.requested


def stopped(cases):
    with AT_ONCE:
        return [stopped_at(asked, name) for asked, name in cases]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_ranks_stop_at_the_same_step_whichever_was_asked(size):
    last = size - 1
    asked = [{last: 3}, {0: 0}, {0: 5, last: 2}, {last: 19}, {}]
    cases = [(case, name) for case in asked for name in ("SIGTERM", "SIGUSR2")]
    late = 0 if size == 1 else 1  # heard at the call after
    for rank, told in enumerate(run(stopped, cases, world_size=size)):
        for (case, _), (step, requested) in zip(cases, told, strict=True):
            first = min(case.values(), default=99) + late
            assert step == (first if first < 20 else None)
            was_asked = case.get(rank, 99) <= (19 if step is None else step)
            assert requested == was_asked


def agree():
    with StopSignal() as stop:
        for _ in range(2):
            stop.agreed()


def diverge(odd):
    raised = caught(lambda: all_reduce_sum(1.5) if world().rank == odd else agree())
    barrier("afterwards")
    return raised, all_reduce_sum(1)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_different_collective_on_one_rank_raises_on_every_rank(odd):
    for raised, total in run(diverge, odd, world_size=3):
        start = "RuntimeError: every rank must make the same calls in the same order,"
        assert str(raised).startswith(start)
        assert f"\n  rank {odd}: all_reduce_sum" in raised.text
        assert ": StopSignal.agreed" in raised.text
        assert total == 3


@pytest.fixture
def mine(monkeypatch):
    """Have a handler of one's own for SIGUSR2, and return what it hears. Nobody sleeps."""
    heard = []
    monkeypatch.setattr(time, "sleep", lambda _: None)
    before = signal.signal(signal.SIGUSR2, lambda *_: heard.append("mine"))
    yield heard
    signal.signal(signal.SIGUSR2, before)


def be_asked():
    os.kill(os.getpid(), signal.SIGUSR2)


def test_previous_handlers_are_restored_and_not_called_inside_the_block(mine, caplog):
    with caplog.at_level("INFO", logger="pardata"), StopSignal() as stop:
        be_asked()
        assert stop.requested
        assert stop.agreed()
        be_asked()
        assert mine == []
    assert "got SIGUSR2: the run stops at this step" in caplog.text
    be_asked()
    assert mine == ["mine"]


def test_a_signal_that_is_repeated_while_the_block_is_left_ends_nothing(mine, monkeypatch):
    waited = []
    monkeypatch.setattr(time, "sleep", lambda seconds: (be_asked(), waited.append(seconds)))
    with StopSignal(signal.SIGUSR2):
        be_asked()
    assert (mine, waited) == ([], [1.0])


def repeated_where_only_rank_0_was_asked():
    with patch.object(time, "sleep", lambda _: be_asked()), StopSignal(signal.SIGUSR2) as stop:
        if world().is_main:
            be_asked()
        while not stop.agreed():
            pass
    return stop.requested


def test_a_late_signal_does_not_end_a_rank_that_stops():
    assert run(repeated_where_only_rank_0_was_asked, world_size=2) == [True, True]


def test_outside_the_main_thread_nothing_is_heard_and_it_says_so_once(caplog):
    answers = []

    def loop():
        for _ in range(2):
            with StopSignal() as stop:
                answers.append(stop.agreed())

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert answers == [False, False]
    assert signal.getsignal(signal.SIGTERM) is before
    assert caplog.text.count("only the main thread hears signals") == 1


def test_ctrl_c_in_that_second_leaves_the_handlers_as_they_were(mine, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt), StopSignal(signal.SIGUSR2):
        be_asked()
    be_asked()
    assert mine == ["mine"]
