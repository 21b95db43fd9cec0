"""What each microbatch of a step counts, and all of them together, over all ranks."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import Raised, caught, run

from pardata import Microbatches, world
from pardata.data._plan import share
from pardata.gradient._count import Pieces, Sharing

RULES = {"own": (0, False), "one": (1, False), "most": (0, True)}


def sharing(rule="own", size=None):
    """Return how the ranks of this world run microbatches: by the rules of the strategies."""
    return Sharing(world().size if size is None else size, None, torch.device("cpu"), *RULES[rule])


def part(rank, size, counts, *, stand_in="first"):
    """Return one rank's microbatches, each of which is its number in the step."""
    own = share(len(counts), rank, size)
    first = 0 if stand_in == "first" else None
    return Microbatches(
        list(own), epoch=0, step=0, first=own.start, counts=counts, size=size, stand_in=first
    )


def own_part(counts):
    return part(world().rank, world().size, counts)


# --- the arithmetic ---


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.integers(1, 7),
    st.sampled_from(list(RULES)),
)
def test_over_all_ranks_each_microbatch_is_run_for_what_it_counts_and_once(counts, size, rule):
    # With a plan nothing is communicated, so ranks need no processes.
    team = [Pieces.of(part(rank, size, counts), None, sharing(rule, size)) for rank in range(size)]
    most = math.ceil(len(counts) / size)
    for rank, pieces in enumerate(team):
        own = len(share(len(counts), rank, size))
        wanted = {"own": own, "one": max(own, 1), "most": most}[rule]
        # What stands in comes first: the first of its own, or else of the step.
        is_stand_in = [piece.number is None for piece in pieces.own]
        assert is_stand_in == [True] * (wanted - own) + [False] * own
        first = next((piece.number for piece in pieces.own if piece.number is not None), 0)
        stand_ins = {(p.microbatch, p.count) for p in pieces.own if p.number is None}
        assert stand_ins <= {(first, 0)}
        assert pieces.most == most
        assert size == 1 or pieces.total() == sum(counts)
    run_here = [piece for pieces in team for piece in pieces.own]
    numbered = [(p.microbatch, p.number, p.count) for p in run_here if p.number is not None]
    assert numbered == [(number, number, count) for number, count in enumerate(counts)]
    assert sum(Fraction(piece.count, sum(counts)) for piece in run_here) == 1


def test_a_model_alone_takes_the_mean_over_its_own_microbatches():
    # In a world of three, say, whose loader shares out: the mean is over what is here.
    pieces = Pieces.of(part(1, 3, [4, 4, 4, 2]), None, sharing(size=1))
    assert [piece.count for piece in pieces.own] == [4]
    assert pieces.total() == 4


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(3, 2), torch.zeros(7)), 3),
        ({"name": ["a"], "x": torch.zeros(4)}, 4),
        (torch.zeros(2, 0), 2),
    ],
)
def test_without_microbatches_the_rows_of_the_first_tensor_count(batch, rows):
    pieces = Pieces.of(batch, None, sharing(size=1))
    (found,) = pieces.own
    assert (found.count, found.number, pieces.total()) == (rows, 0, rows)
    assert found.microbatch is batch


@pytest.mark.parametrize("batch", [torch.tensor(1.0), ["text"], 3, [torch.tensor(2), [1]]])
def test_a_batch_without_rows_asks_for_a_count(batch):
    pieces = Pieces.of(batch, None, sharing(size=1))
    text = f"must hold a tensor whose rows are its samples, but a {type(batch).__name__} has none"
    with pytest.raises(TypeError, match=text + ": pass `count`"):
        pieces.total()
    assert Pieces.of(batch, lambda _: 2, sharing(size=1)).total() == 2


@pytest.mark.parametrize(
    "number", [7, np.int64(7), np.uint8(7), torch.tensor(7), torch.tensor([7])]
)
def test_a_count_may_be_any_kind_of_integer(number):
    pieces = Pieces.of("batch", lambda _: number, sharing(size=1))
    assert pieces.total() == 7
    assert type(pieces.own[0].count) is int


@pytest.mark.parametrize(
    "number", [2.0, "2", None, True, np.float64(2), torch.tensor([1, 2]), 2 + 0j], ids=repr
)
def test_a_count_that_is_no_integer_is_refused(number):
    pieces = Pieces.of("batch", lambda _: number, sharing(size=1))
    with pytest.raises(TypeError, match="`count` must return an integer, but returned ") as raised:
        pieces.total()
    assert f"returned {number!r} ({type(number).__name__})" in str(raised.value)


@pytest.mark.parametrize("batch", ["batch", part(0, 1, [3, 3]), part(0, 1, [])])
def test_a_step_that_counts_nothing_is_refused(batch):
    pieces = Pieces.of(batch, lambda _: 0, sharing(size=1))
    with pytest.raises(ValueError, match="must count something, but all its microbatches count 0"):
        pieces.total()


@pytest.mark.parametrize("rule", ["one", "most"])
def test_a_rank_that_must_run_one_and_has_none_at_all_is_told_what_to_give(rule):
    batch = part(2, 3, [4, 4], stand_in=None)
    assert len(batch) == 0
    text = "must have a microbatch to run where the others run one, but .*none of 2.* has none"
    with pytest.raises(ValueError, match=text + ": give it a stand_in, any microbatch of the step"):
        Pieces.of(batch, None, sharing(rule, 3))
    assert Pieces.of(batch, None, sharing("own", 3)).own == []


# --- over several ranks ---


def totals():
    here = world()
    batch = own_part([4, 4, 4, 3])
    asked = []
    tokens = Pieces.of(batch, lambda n: asked.append(n) or 100**n, sharing("one"))
    rows = Pieces.of(torch.zeros(here.rank + 1, 2), None, sharing("one"))
    planned = Pieces.of(batch, None, sharing("one"))
    nothing = caught(Pieces.of(batch, lambda _: 0, sharing("one")).total)
    some = Pieces.of(torch.zeros(int(here.rank == 0), 3), None, sharing("one")).total()
    found = [pieces.total() for pieces in (tokens, planned, tokens, rows)]
    return found, some, nothing, asked == list(batch)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_total_is_over_all_ranks_and_0_only_where_nothing_counts_on_any(size):
    tokens = 1 + 100 + 100**2 + 100**3
    for found, some, nothing, each_once in run(totals, world_size=size):
        assert found == [tokens, 15, tokens, size * (size + 1) // 2]
        assert some == 1
        assert each_once
        assert nothing.type == "ValueError"
        assert "a step must count something, but all its microbatches count 0" in nothing.text


BAD = {
    "ZeroDivisionError": (lambda: 1 // 0, "division"),
    "TypeError": (lambda: 1.5, "`count` must return an integer, but returned 1.5 (float)"),
    "ValueError": (lambda: -2, "`count` must return an integer from 0 up, but returned -2"),
}


def one_rank_fails():
    here = world()
    batch = own_part([2] * here.size)
    found = {}
    for kind, (bad, _) in BAD.items():
        is_last = here.rank == here.size - 1
        count = (lambda _, bad=bad: bad()) if is_last else lambda _: 1
        found[kind] = caught(Pieces.of(batch, count, sharing("one")).total)
        dist.barrier()  # the group works
    assert Pieces.of(batch, lambda _: 3, sharing("one")).total() == 3 * here.size
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_an_error_in_count_on_one_rank_is_raised_on_every_rank(size):
    *others, last = run(one_rank_fails, world_size=size)
    for kind, (_, text) in BAD.items():
        assert last[kind].type == kind
        assert text in last[kind].text
        for found in others:
            assert isinstance(found[kind], Raised)
            assert found[kind].type == "RuntimeError"
            assert "must be counted, but that failed on 1 other rank(s): see" in found[kind].text
