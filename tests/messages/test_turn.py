"""A turn: all say something, one verdict, and who is missing, elsewhere or failed is named."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from on_ranks import caught
from ranks_zoo import seat, together

from pardata.messages import _store, _verdict
from pardata.messages._store import Channel
from pardata.messages._turn import Turn, all_say, call_off

SOON = timedelta(seconds=0.2)
LONG = timedelta(seconds=30)


@pytest.fixture
def line():
    return Channel(dist.HashStore(), LONG, 0, 1)


def say(line, rank, size, call="here", *, value=None, decide=list, timeout=LONG):
    """Say something in the next turn of a rank."""
    return all_say(seat(line, rank, size), call, lambda: value, decide, timeout=timeout)


def gave_up(line, rank, size):
    """Wait in vain in the next turn."""
    return say(line, rank, size, timeout=SOON)


def led(line, rank, size, call="rank_zero_first", *, value=None):
    """Lead the next turn, or wait in it."""
    turn = Turn(seat(line, rank, size), call)
    if rank:
        return turn.decision(turn.heard(LONG))
    turn.come()
    turn.tell(decision=value)
    return value


# --- what is said


def over_files(path, _options):
    return [dist.FileStore(str(path / "store")) for _ in range(3)]


def over_tcp(_path, options):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, **options)
    return [server] + [dist.TCPStore("127.0.0.1", server.port, **options) for _ in range(2)]


@pytest.mark.parametrize("prefixes", [(), ("run",), ("run", "group")])
@pytest.mark.parametrize(
    ("stores_of", "options"), [(over_files, {}), (over_tcp, {}), (over_tcp, {"use_libuv": False})]
)
def test_turns_run_over_every_kind_of_store(stores_of, options, prefixes, tmp_path):
    stores = stores_of(tmp_path, options)
    for prefix in prefixes:
        stores = [dist.PrefixStore(prefix, store) for store in stores]

    def values_of(rank):
        line = Channel(stores[rank], LONG, 0, 1)
        told = [say(line, rank, 3, value=f"{turn}-{rank} …\n") for turn in range(3)]
        return told, led(line, rank, 3, value=5), say(line, rank, 3)

    told = [[f"{turn}-{rank} …\n" for rank in range(3)] for turn in range(3)]
    began = time.monotonic()
    assert together(values_of, 3) == [(told, 5, [None] * 3)] * 3
    assert time.monotonic() - began < LONG.total_seconds() / 2  # a verdict wakes who waits for it


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_hundred_turns_leave_no_more_in_the_store_than_two(line, size, monkeypatch):
    for module in (_store, _verdict):  # so that the longer ones go in parts
        monkeypatch.setattr(module, "PART", 500 if size > 1 else 10**6)

    def many(rank, times):
        for length in (1, 1200) * (times // 2):
            assert led(line, rank, size, "rank_zero_call", value="x" * length) == "x" * length
            told = say(line, rank, size, value="y" * 100, decide=lambda texts: texts * 9)
            assert told == ["y" * 100] * size * 9

    together(lambda rank: many(rank, 2), size)
    after_two = line.store.num_keys()
    together(lambda rank: many(rank, 100), size)
    assert line.store.num_keys() == after_two <= 2 * size + 1


# --- ranks in different calls


def test_a_rank_that_left_its_wait_by_an_interrupt_is_shown_where_it_is(line):
    line.store.add("turn/1", 1)
    line.store.add("came/1", 1)
    line.store.set("at/1", '{"turn": 2, "call": "later()"}')
    raised = caught(say, line, 0, 2, "barrier()")
    assert raised.text.endswith("  rank 0: barrier()\n  rank 1: later(), which comes later")


# --- who does not come


def test_where_one_gives_up_all_who_wait_hear_the_same_at_once(line):
    def meet(rank):
        if rank == 1:
            line.store.wait(["at/0"], LONG)
        if rank != 2:
            say(line, rank, 3, "b", timeout=SOON if rank else LONG)

    for raised in together(meet, 3)[:2]:
        assert raised.seconds < 10
        assert "but rank 2 of 3 did not come within 0:00:00.200000" in raised.text


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("is_led", [False, True], ids=["all decide", "rank 0 decides"])
def test_a_rank_that_came_too_late_meets_the_others_in_their_next_call(line, late, is_led):
    assert caught(gave_up, line, 1 - late, 2).type == "TimeoutError"
    if is_led:
        assert together(lambda rank: led(line, rank, 2, value=5), 2) == [5, 5]
    assert together(lambda rank: say(line, rank, 2, "b", value=rank), 2) == [[0, 1]] * 2


def test_rank_0_that_is_given_up_while_it_looks_gives_its_verdict_in_the_next_turn(line):
    turn = Turn(seat(line, 0, 2), "rank_zero_first")
    turn.come()
    line.store.set("verdict/1", '{"rank": 1, "call": "a", "missing": [0], "off": ""}')
    turn.tell(decision=7)
    line.store.add("turn/1", 1)
    assert led(line, 1, 2) == 7


def test_a_rank_that_gave_up_before_and_now_does_not_come_is_named(line):
    assert caught(gave_up, line, 0, 2).type == "TimeoutError"
    raised = caught(gave_up, line, 1, 2)
    assert "but rank 0 of 2 did not come" in raised.text
    assert raised.text.endswith("; rank 0 came before, and gave up waiting for this rank")


def test_what_takes_longer_than_the_groups_timeout_is_waited_for_as_long_as_one_says():
    line = Channel(dist.HashStore(), timedelta(seconds=0.1), 0, 1)

    def late(rank):
        time.sleep(0 if rank else 0.35)
        return led(line, rank, 2, value="done"), say(line, rank, 2)

    assert together(late, 2) == [("done", [None, None])] * 2


# --- who failed


def test_of_two_that_call_off_the_first_is_read(line):
    for rank in (1, 2):
        call_off(seat(line, rank, 3), f"rank {rank} failed")
    assert "rank 1 failed" in caught(say, line, 0, 3, "f").text


def test_who_is_turns_ahead_of_a_rank_that_calls_off_hears_of_it_too(line):
    # Rank 0 decided twice; then it gave the others up.
    for _ in range(2):
        led(line, 0, 3)
    assert caught(gave_up, line, 0, 3).type == "TimeoutError"
    waits = threading.Thread(target=lambda: outcome.append(caught(say, line, 0, 3, "ahead")))
    outcome = []
    waits.start()
    call_off(seat(line, 1, 3), "rank 1 failed")
    waits.join()
    assert "`ahead` must be reached by every rank, but rank 1 failed; this" in outcome[0].text


def test_who_leads_is_told_of_a_rank_that_called_off_when_its_work_is_done(line):
    turn = Turn(seat(line, 0, 2), "rank_zero_first")
    turn.come()
    call_off(seat(line, 1, 2), "rank 1 failed")
    raised = caught(lambda: turn.tell(decision=None))
    assert "rank 0 must finish its `rank_zero_first`, but rank 1 failed; this" in raised.text


def test_where_the_last_to_come_dies_before_its_verdict_another_gives_it(line):
    line.store.add("turn/1", 1)
    own = '{"turn": 1, "call": "here", "failed": null, "value": "from the grave"}'
    line.store.set("at/1", own)
    assert say(line, 0, 2, value="x", timeout=SOON) == ["x", "from the grave"]
