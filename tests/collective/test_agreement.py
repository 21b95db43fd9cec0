"""Ranks that disagree find out, on every rank, with a table of who has what."""

import pytest
from on_ranks import caught, run_caught

from pardata import barrier, world
from pardata.collective._agreement import agree, require_same, same
from pardata.ranks._world import channel


def compare_long_facts(length, odd):
    here = world()
    seen = []

    def facts():
        return {"table": "x" * length, "rank": here.rank == odd}

    def differ(told):
        seen.append([each["rank"] for each in told])
        require_same("f", told, "cure")

    raised = caught(same, here, "f", facts, differ)
    entry = channel().store.get(f"at/{here.rank}") if here.size > 1 else b""
    barrier("afterwards")
    return raised, len(entry), seen


@pytest.mark.parametrize("size", [1, 2, 3])
def test_of_facts_that_are_the_same_a_digest_travels(size):
    for raised, length, seen in run_caught(compare_long_facts, 10**5, 9, world_size=size):
        assert (raised, seen) == (None, [])
        assert length < 300


@pytest.mark.parametrize("size", [2, 3])
def test_of_facts_that_differ_one_rank_reads_all_and_all_raise_the_same(size):
    outcomes = run_caught(compare_long_facts, 5, 1, world_size=size)
    others = "rank 0" if size == 2 else "ranks 0, 2"
    for raised, _, _ in outcomes:
        assert str(raised) == (
            f"RuntimeError: every rank must pass the same to `f`, but `rank` differs:\n"
            f"  {others}: rank=False\n  rank 1: rank=True\ncure"
        )
    told = [rows for _, _, seen in outcomes for rows in seen]
    assert told == [[rank == 1 for rank in range(size)]]


def fail_on(*ranks):
    here = world()

    def state():
        if here.rank in ranks:
            raise ValueError(f"batch size of rank {here.rank}")
        return {}

    try:
        return agree(here, "make_loader", state)
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


def test_a_number_and_its_text_are_not_the_same():
    with pytest.raises(RuntimeError, match="differ"):
        require_same("f", [{"seed": 1}, {"seed": "1"}], "cure")
