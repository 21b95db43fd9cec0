"""A vote of which one rank has no part, being in another call: all are told."""

import pytest
from on_ranks import caught, run

from pardata import StopSignal, all_gather, all_reduce_sum, barrier, world
from pardata.collectives._fingerprint import CheckedCollective


def vote():
    return CheckedCollective("another vote", dict, str).start_min_max([3])()


CALLS = {
    "all_reduce_sum": lambda: all_reduce_sum({"loss": 1.5}),
    "all_gather": lambda: all_gather([1, 2, 3]),
    "another vote": vote,
}


def stop():
    with StopSignal() as stop:
        for _ in range(2):
            stop.agreed()


def diverge(odd):
    found = []
    for call in CALLS.values():
        found.append(caught(call if world().rank == odd else stop))
        barrier("afterwards")
    return found, all_reduce_sum(1)


@pytest.mark.parametrize(("size", "odd"), [(2, 0), (2, 1), (3, 1)])
def test_ranks_of_which_one_is_in_another_collective_are_told_and_the_group_stays_usable(size, odd):
    for found, total in run(diverge, odd, world_size=size):
        for raised, call in zip(found, CALLS, strict=True):
            assert raised.type == "RuntimeError"
            assert raised.text.startswith("every rank must make the same calls in the same order,")
            assert f"\n  rank {odd}: {call}" in raised.text
            assert ": StopSignal.agreed" in raised.text
        assert total == size
