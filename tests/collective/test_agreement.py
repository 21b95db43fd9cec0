"""Ranks that disagree find out, on every rank, with a table of who has what."""

import pytest
from on_ranks import run_caught

from pardata import barrier, world
from pardata.collective._agreement import agree, require_same


def tell():
    here = world()
    facts = {"length": 10 + here.rank, "name": "x", "nested": [1, {"a": None}]}
    told = agree(here, "make_loader", lambda: facts)
    barrier("afterwards")
    return told


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_learns_the_facts_of_all_in_rank_order(size):
    facts = [{"length": 10 + rank, "name": "x", "nested": [1, {"a": None}]} for rank in range(size)]
    assert run_caught(tell, world_size=size) == [facts] * size


def test_one_process_gets_its_own_facts_and_not_the_same_dictionary():
    facts = {"length": 3}
    (told,) = agree(world(), "make_loader", lambda: facts)
    assert told == facts
    assert told is not facts


def fail_on(*ranks):
    here = world()

    def state():
        if here.rank in ranks:
            message = f"batch size of rank {here.rank}"
            raise ValueError(message)
        return {}

    try:
        return agree(here, "make_loader", state)
    finally:
        barrier("afterwards")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_bad_argument_on_one_rank_raises_there_and_is_told_to_the_others(size):
    bad = size - 1
    outcomes = run_caught(fail_on, bad, world_size=size)
    assert outcomes[bad].type == "ValueError"
    assert outcomes[bad].text == f"batch size of rank {bad}"
    for rank, raised in enumerate(outcomes[:bad]):
        assert raised.type == "RuntimeError"
        assert raised.text == (
            f"rank {bad} failed in `make_loader`: ValueError: batch size of rank {bad}\n"
            f"(seen on rank {rank}, which did nothing wrong)"
        )


def test_bad_arguments_on_several_ranks_are_all_told():
    outcomes = run_caught(fail_on, 1, 2, world_size=3)
    assert [raised.type for raised in outcomes] == ["RuntimeError", "ValueError", "ValueError"]
    for rank in (1, 2):
        assert f"rank {rank} failed in `make_loader`: ValueError" in outcomes[0].text


def test_facts_that_differ_make_a_table_with_one_line_for_each_opinion():
    told = [{"length": 10, "seed": 1, "name": "x"} for _ in range(4)]
    told[2] = {"length": 9, "seed": 1, "name": "x"}
    with pytest.raises(RuntimeError) as caught:
        require_same("make_loader", told, "give every rank the same data")
    assert str(caught.value) == (
        "every rank must pass the same to `make_loader`, but `length` differ:\n"
        "  ranks 0, 1, 3: length=10\n"
        "  rank 2: length=9\n"
        "give every rank the same data"
    )


def test_a_number_and_its_text_are_not_the_same():
    with pytest.raises(RuntimeError, match="differ"):
        require_same("f", [{"seed": 1}, {"seed": "1"}], "cure")
