"""A round: all ranks contribute, all get one result, and a rank that does not come is named."""

import json
import threading
import time
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch.distributed as dist
from common_store import LONG, clients, together
from on_ranks import caught

from pardata.store._round import abort_rounds, exchange, lead

SOON, HALF = timedelta(seconds=0.2), LONG.total_seconds() / 2


def give(client, value=None, call="here", decide=list, timeout=None):
    """Take part in a round with a value."""
    return exchange(client, call, lambda: value, decide, timeout)


def gave_up(client):
    """Wait in vain in a round."""
    return give(client, timeout=SOON)


def led(client, call="rank_zero_first"):
    """Lead a round as rank 0, for which the others wait in it."""
    with nullcontext() if client.rank else lead(client, call):
        pass
    give(client, call=call, timeout=LONG)


# --- what is decided


def over_files(path, _options):
    return [dist.FileStore(str(path / "store")) for _ in range(3)]


def over_tcp(_path, options):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, **options)
    return [server] + [dist.TCPStore("127.0.0.1", server.port, **options) for _ in range(2)]


@pytest.mark.parametrize("prefixes", [(), ("run", "group")])
@pytest.mark.parametrize(
    ("stores_of", "options"), [(over_files, {}), (over_tcp, {}), (over_tcp, {"use_libuv": False})]
)
def test_rounds_run_over_every_kind_of_store(stores_of, options, prefixes, tmp_path):
    stores = stores_of(tmp_path, options)
    for prefix in prefixes:
        stores = [dist.PrefixStore(prefix, store) for store in stores]

    def values_of(client):
        values = [give(client, f"{number}-{client.rank} …\n") for number in range(3)]
        led(client)
        return values, give(client)

    values = [[f"{number}-{rank} …\n" for rank in range(3)] for number in range(3)]
    began = time.monotonic()
    assert together(values_of, clients(3, stores)) == [(values, [None] * 3)] * 3
    assert time.monotonic() - began < HALF  # a result wakes who waits for it


@pytest.mark.parametrize("size", [2, 4])
def test_a_hundred_rounds_leave_no_more_in_the_store_than_two(size):
    store = dist.HashStore()
    ranks = clients(size, store)

    def many(client, times):
        for _ in range(times):
            led(client)
            assert give(client, "y" * 100) == ["y" * 100] * size

    together(lambda client: many(client, 2), ranks)
    after_two = store.num_keys()
    together(lambda client: many(client, 100), ranks)
    assert store.num_keys() == after_two <= 2 * size + 1


def arrived_as_rank_1(client, number, call):
    """Be rank 1, which wrote what it gives, and ended, or was interrupted, before the result."""
    client.store.add("count/1", 1)
    entry = {"round": number, "call": call, "error": None, "value": "from the grave"}
    client.store.set("at/1", json.dumps(entry))


def test_where_the_last_to_arrive_ends_before_it_decides_another_does():
    first, _ = clients(2)
    arrived_as_rank_1(first, 1, "here")
    assert give(first, "x", timeout=SOON) == ["x", "from the grave"]


def test_a_long_error_text_is_shortened_on_every_rank():
    def refuse(_values):
        raise ValueError("x" * 10**7)

    stores = over_tcp(None, {})
    for raised in together(lambda client: give(client, decide=refuse), clients(3, stores)):
        assert raised.type == "ValueError"
        assert len(raised.text) < 10**5


# --- ranks in different calls


def test_an_interrupted_rank_is_shown_in_its_current_call():
    client, _ = clients(2)
    arrived_as_rank_1(client, 2, "later()")
    raised = caught(give, client, None, "barrier()")
    assert raised.text.endswith("  rank 0: barrier()\n  rank 1: later(), which comes later")


def test_a_rank_interrupted_before_it_arrives_is_not_awaited():
    def interrupted():
        raise KeyboardInterrupt

    first, second = clients(2)
    with pytest.raises(KeyboardInterrupt):
        exchange(first, "here", interrupted)
    abort_rounds(first, "rank 0 was interrupted")
    raised = caught(give, second)
    assert "but rank 0 was interrupted; this rank waits at" in raised.text


# --- ranks that do not come


def test_where_one_gives_up_all_who_wait_hear_the_same_at_once():
    def meet(client):
        if client.rank == 1:
            client.store.wait(["at/0"], LONG)
        if client.rank != 2:
            give(client, timeout=SOON if client.rank else LONG)

    for raised in together(meet, clients(3))[:2]:
        assert (raised.type, raised.seconds < HALF) == ("TimeoutError", True)
        assert "but rank 2 of 3 did not come within 0:00:00.200000" in raised.text


@pytest.mark.parametrize("late", [0, 1])
def test_after_a_timeout_every_later_call_says_why_on_all_ranks(late):
    ranks = clients(2)
    did_not_come = f"rank {late} of 2 did not come within 0:00:00.200000"
    assert did_not_come in caught(gave_up, ranks[1 - late]).text
    assert did_not_come in caught(give, ranks[late]).text
    for client in ranks:
        for call in give, led:
            raised = caught(call, client)
            assert raised.type == "RuntimeError"
            assert "no call can follow in this group: " + did_not_come in raised.text


def test_a_call_may_wait_longer_than_the_groups_timeout():
    def late(client):
        time.sleep(0 if client.rank else 0.35)
        led(client)
        return give(client, timeout=LONG)

    ranks = clients(2, timeout=timedelta(seconds=0.1))
    assert together(late, ranks) == [[None, None]] * 2


# --- ranks that leave


def test_of_two_that_leave_the_first_is_read():
    ranks, outcome = clients(3), []
    waits = threading.Thread(target=lambda: outcome.append(caught(give, ranks[0], None, "ahead")))
    waits.start()
    for client in ranks[1:]:
        abort_rounds(client, f"rank {client.rank} failed")
    waits.join()
    assert "`ahead` must be reached by every rank, but rank 1 failed; this" in outcome[0].text


def test_the_leading_rank_learns_of_a_failed_rank_afterwards():
    first, second = clients(2)
    with lead(first, "rank_zero_first"):
        abort_rounds(second, "rank 1 failed")
    text = caught(give, first, None, "rank_zero_first").text
    assert "must be reached by every rank, but rank 1 failed;" in text
