"""Ranks that differ in what they save are told, by the path of what differs."""

import random

import pytest
import torch
from on_ranks import caught, run, run_caught

from pardata import world
from pardata.checkpoint._comparison import agree_on_options, agree_on_states
from pardata.seeds._generators import restore_generators


def tell_options():
    here = world()
    agree_on_options(here, "save", lambda: {"step": 3, "objects": ["a"]})
    return caught(agree_on_options, here, "save", lambda: {"step": here.rank // 2, "keep": 1})


@pytest.mark.parametrize("size", [3, 4])
def test_options_that_differ_are_a_table_on_every_rank(size):
    others = "rank 2" if size == 3 else "ranks 2, 3"
    for raised in run_caught(tell_options, world_size=size):
        assert raised.type == "RuntimeError"
        assert raised.text == (
            "every rank must pass the same to `save`, but `step` differ:\n"
            f"  ranks 0, 1: step=0\n  {others}: step=1\n"
            "Pass the same on all ranks: `all_gather` collects what is not, and `rank_zero_call` "
            "gives all the name of a directory that rank 0 has made."
        )


def tell_a_bad_option():
    return caught(agree_on_options, world(), "save", lambda: {"step": 1 // world().rank})


def test_what_one_rank_raises_is_told_to_all():
    first, second = run_caught(tell_a_bad_option, world_size=2)
    assert first.type == "ZeroDivisionError"
    assert "rank 0 failed in `save`: ZeroDivisionError" in second.text


TREES = [
    (lambda rank: {"a": torch.ones(1) * rank}, None),
    (lambda rank: {"a": torch.ones(rank)}, None),
    (lambda rank: {"a": float("nan")}, None),
    (lambda rank: {"a": {"x", "yy", "zzz", "t" * 9, "u" * 7}}, None),
    (lambda rank: {"a": {"b": [1, "r" * 200, rank]}}, "`a.b.2` differ"),
    (lambda rank: {"a": 1, **({"b": 2} if rank else {})}, "rank 0: b='(nothing)'"),
    (lambda rank: {"a": 1, **({} if rank else {"b": 2})}, "rank 1: b='(nothing)'"),
    (lambda rank: {"a": 1 if rank else 1.0}, "rank 0: a='1.0'\n  rank 1: a='1'"),
    (lambda rank: {"a": torch.ones(1) if rank else 1}, "rank 1: a='a Tensor'"),
]


def tell_states():
    here = world()
    return [caught(agree_on_states, here, "save", make(here.rank)) for make, _ in TREES]


def test_states_that_differ_are_named_by_their_paths():
    for rank, told in enumerate(run_caught(tell_states, world_size=2)):
        for (_, text), outcome in zip(TREES, told, strict=True):
            if text is None:
                assert len(outcome) == (2 if rank == 0 else 0)
            else:
                assert outcome.type == "RuntimeError"
                assert text in outcome.text


def tell_generators():
    here = world()
    random.seed(here.rank)
    states = agree_on_states(here, "save", {})
    own = random.random()
    found = []
    for state in states:
        restore_generators(state, here.device)
        found.append(random.random())
    return own, found


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rank_0_learns_where_the_generators_of_all_are(size):
    (first, found), *others = run(tell_generators, world_size=size)
    assert found == [first, *(own for own, _ in others)]
    assert [found for _, found in others] == [[]] * (size - 1)
