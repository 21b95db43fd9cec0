"""Ranks that disagree find out, on every rank, with a table of who has what."""

import pytest
from on_ranks import run_caught

from pardata import barrier, world
from pardata.environment._world import store_client
from pardata.store._round import exchange


def fail_on(*ranks):
    here = world()

    def state():
        if here.rank in ranks:
            raise ValueError(f"batch size of rank {here.rank}")
        return {}

    try:
        return exchange(store_client(), "make_loader", state)
    finally:
        barrier("afterwards")


@pytest.mark.parametrize(("size", "bad"), [(1, [0]), (2, [1]), (4, [3]), (3, [1, 2])])
def test_bad_arguments_raise_where_they_are_and_all_are_told_to_the_others(size, bad):
    said = [f"rank {b} failed in `make_loader`: ValueError: batch size of rank {b}" for b in bad]
    for rank, raised in enumerate(run_caught(fail_on, *bad, world_size=size)):
        if rank in bad:
            assert (raised.type, raised.text) == ("ValueError", f"batch size of rank {rank}")
        else:
            assert raised.type == "RuntimeError"
            seen = f"(seen on rank {rank}, which did nothing wrong)"
            assert raised.text == "\n".join([*said, seen])
