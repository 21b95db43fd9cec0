"""Messages over a store: everybody's value, one rank's news, and who did not come."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from launched import launched, slurm_variables
from on_ranks import caught

import pardata
from pardata.ranks import _store
from pardata.ranks._store import (
    Channel,
    bounded,
    call_off,
    collect,
    exchange,
    next_turn,
    publish,
)

SOON = timedelta(seconds=0.6)
LONG = timedelta(seconds=30)


@dataclass
class Seat:
    """All that `exchange` needs to know of a rank."""

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


@pytest.fixture
def line():
    return Channel(dist.HashStore(), LONG)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_exchange_gives_every_rank_the_values_of_all_in_rank_order(line, size):
    def three_times(rank):
        seat = Seat(rank, size)
        return [exchange(line, seat, "here", f"{turn}-{rank}", LONG) for turn in range(3)]

    expected = [[f"{turn}-{rank}" for rank in range(size)] for turn in range(3)]
    assert together(three_times, size) == [expected] * size


def over_files(path, _options):
    return [dist.FileStore(str(path / "store")) for _ in range(3)]


def over_tcp(_path, options):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, **options)
    return [server] + [dist.TCPStore("127.0.0.1", server.port, **options) for _ in range(2)]


@pytest.mark.parametrize("prefixes", [(), ("run",), ("run", "group")])
@pytest.mark.parametrize(
    ("stores_of", "options"), [(over_files, {}), (over_tcp, {}), (over_tcp, {"use_libuv": False})]
)
def test_an_exchange_runs_over_every_kind_of_store(stores_of, options, prefixes, tmp_path):
    stores = stores_of(tmp_path, options)
    for prefix in prefixes:
        stores = [dist.PrefixStore(prefix, store) for store in stores]

    def values_of(rank):
        line, seat = Channel(stores[rank], LONG), Seat(rank, 3)
        return [exchange(line, seat, "here", f"{turn}-{rank} …\n", LONG) for turn in range(3)]

    expected = [[f"{turn}-{rank} …\n" for rank in range(3)] for turn in range(3)]
    assert together(values_of, 3) == [expected] * 3


class Counted:
    """A store that counts what is asked of it."""

    def __init__(self, store):
        self._store = store
        self.asked = Counter()

    def __getattr__(self, name):
        self.asked[name] += 1
        return getattr(self._store, name)


def test_an_exchange_asks_for_the_values_of_all_ranks_at_once(line):
    stores = [Counted(line.store) for _ in range(8)]
    exchanged = together(
        lambda rank: exchange(Channel(stores[rank], LONG), Seat(rank, 8), "here", "", LONG), 8
    )
    assert exchanged == [[""] * 8] * 8
    for store in stores:
        assert store.asked == {"add": 1, "set": 1, "wait": 1, "multi_get": 1}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_hundred_exchanges_leave_no_more_in_the_store_than_two(line, size):
    def many(rank, times):
        for _ in range(times):
            exchange(line, Seat(rank, size), "here", "x" * 100, LONG)

    together(lambda rank: many(rank, 2), size)
    after_two = line.store.num_keys()
    together(lambda rank: many(rank, 100), size)
    assert line.store.num_keys() == after_two <= 2 * size


def test_ranks_in_different_calls_are_told_who_is_where_and_go_on(line):
    places = ["barrier('a')", "barrier('b')", "barrier('a')"]

    def diverge(rank):
        return exchange(line, Seat(rank, 3), places[rank], "", LONG)

    for raised in together(diverge, 3):
        assert raised.type == "RuntimeError"
        assert "every rank must make the same calls in the same order, but here:" in raised.text
        assert raised.text.endswith("\n  ranks 0, 2: barrier('a')\n  rank 1: barrier('b')")
    assert (
        together(lambda rank: exchange(line, Seat(rank, 3), "c", str(rank), LONG), 3)
        == [["0", "1", "2"]] * 3
    )


@pytest.mark.parametrize(("coming", "names"), [([0, 1, 3], "rank 2"), ([2], "ranks 0, 1, 3")])
def test_ranks_that_do_not_come_are_named(line, coming, names):
    def meet(rank):
        if rank in coming:
            exchange(line, Seat(rank, 4), "barrier('epoch')", "", SOON)

    outcomes = together(meet, 4)
    for rank in coming:
        assert outcomes[rank].type == "TimeoutError"
        assert re.fullmatch(
            re.escape(
                f"`barrier('epoch')` must be reached by every rank, but {names} of 4 did not come "
                f"within {SOON}: look at the output of {names} for an earlier error, or "
                f"for a branch that skips this call; this rank waits at "
            )
            + r"\S*test_store\.py:\d+",
            outcomes[rank].text,
        )


def test_after_a_rank_came_too_late_the_next_exchange_meets_the_same_one(line):
    assert caught(exchange, line, Seat(0, 2), "a", "", SOON).type == "TimeoutError"
    both = together(lambda rank: exchange(line, Seat(rank, 2), "b", str(rank), LONG), 2)
    assert both == [["0", "1"]] * 2


def test_a_rank_that_came_and_gave_up_first_is_not_named_by_the_next(line):
    def meet(rank):
        if rank != 2:
            exchange(line, Seat(rank, 3), "b", "", SOON * (1 + rank))

    for raised in together(meet, 3)[:2]:
        assert "but rank 2 of 3 did not come" in raised.text


def test_a_rank_that_gave_up_before_and_now_does_not_come_is_named(line):
    assert caught(exchange, line, Seat(0, 2), "a", "", SOON).type == "TimeoutError"
    raised = caught(exchange, line, Seat(1, 2), "b", "", SOON)
    assert "but rank 0 of 2 did not come" in raised.text


@pytest.mark.parametrize("others", [[0], [0, 2]])
def test_who_waits_for_a_rank_that_called_off_reads_why_at_once(line, others):
    # The rank that is late keeps nobody waiting either.
    def meet(rank):
        exchange(line, Seat(rank, 4), "first", "", LONG)
        if rank == 1:
            call_off(line, Seat(1, 4), "rank 1 of 4 failed first: ValueError: boom")
        if rank in others:
            exchange(line, Seat(rank, 4), "second", "", LONG)

    def come_late(rank):
        exchange(line, Seat(rank, 4), "second", "", LONG)

    outcomes = together(meet, 4)
    late = [caught(come_late, rank) for rank in (2, 3) if rank not in others]
    for raised in [*(outcomes[rank] for rank in others), *late]:
        assert raised.type == "RuntimeError"
        assert raised.seconds < 20
        assert raised.text.startswith(
            "`second` must be reached by every rank, but rank 1 of 4 failed first: ValueError: "
            "boom; this rank waits at "
        )


def test_of_two_that_call_off_the_first_is_read(line):
    for rank in (1, 2):
        call_off(line, Seat(rank, 3), f"rank {rank} failed")
    assert "rank 1 failed" in caught(exchange, line, Seat(0, 3), "f", "", LONG).text


def test_what_hangs_or_fails_in_the_store_does_not_hold_its_caller():
    done = threading.Event()
    start = time.monotonic()
    bounded(0.1, lambda: done.wait(30))
    assert time.monotonic() - start < 10
    done.set()
    bounded(30, lambda: dist.HashStore().wait(["never"], SOON))


def lose_rank_0(call, directory):
    # The store lives in rank 0's process, as under SLURM and MPI.
    pardata.init(timeout=LONG)
    pardata.barrier()
    if pardata.world().rank == 0:
        time.sleep(0.2)  # the other is waiting by now
        os._exit(3)
    raised = caught(CALLS[call])
    (Path(directory) / "outcome").write_text(f"{raised.type} {raised.seconds:.1f} {raised.text}")


def nothing():
    """Run on rank 0."""


CALLS = {
    "barrier": pardata.barrier,
    "rank_zero_call": lambda: pardata.rank_zero_call(nothing),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_dies_with_the_store_is_an_error_at_once_and_no_timeout(call, tmp_path):
    with pytest.raises(RuntimeError, match="the process ended with exit code 3"):
        launched(lose_rank_0, call, str(tmp_path), size=2, variables=slurm_variables)
    kind, seconds, text = (tmp_path / "outcome").read_text().split(" ", 2)
    assert kind == "RuntimeError"
    assert float(seconds) < 20
    assert text.startswith(
        "the process that serves the group's store (rank 0, or torchrun's agent) must be there as "
        "long as any rank, but has ended: look at its output for an earlier error; this rank is at "
    )


FROZEN = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@contextmanager
def frozen_store():
    """Yield a store whose process is stopped as soon as it has answered once."""
    with subprocess.Popen(
        [sys.executable, "-c", FROZEN], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
            store.set("there", "yes")
            server.send_signal(signal.SIGSTOP)
            yield Channel(store, timedelta(seconds=0.5))
        finally:
            server.kill()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process by SIGSTOP")
def test_a_store_that_does_not_answer_is_an_error_and_no_hang(monkeypatch):
    monkeypatch.setattr(_store, "_MARGIN", 0.5)
    with frozen_store() as line:
        for call in (
            lambda: exchange(line, Seat(0, 2), "somewhere", "x", line.timeout),
            lambda: next_turn(line, "somewhere", 0),
            lambda: collect(line, "key", 1, "somewhere", line.timeout),
            lambda: collect(line, "key", 1, "somewhere", timedelta(hours=2)),
        ):
            raised = caught(call)
            assert raised.type == "TimeoutError"
            assert re.fullmatch(
                r"the process that serves the group's store .* must answer, but has not for "
                r"0:00:00\.5.* This rank is at .*test_store\.py:\d+",
                raised.text,
            )


def test_what_takes_longer_than_the_groups_timeout_is_waited_for_as_long_as_one_says():
    line = Channel(dist.HashStore(), timedelta(seconds=0.1))
    late = threading.Timer(0.35, publish, [line, "key", "done"])
    late.start()
    assert collect(line, "key", 1, "somewhere", timedelta(seconds=20)) == "done"
    late.join()
