"""What each microbatch of a step counts, and all of them together, over all ranks."""

import math
import re
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

SIZES = [1, 2, 3, 4]


def sharing(rule="own", size=None):
    """Return how the ranks of this world run microbatches: by the rules of the strategies."""
    at_least = {
        "own": lambda own, most: own,
        "one": lambda own, most: max(own, 1),
        "most": lambda own, most: most,
    }[rule]
    return Sharing(world().size if size is None else size, None, torch.device("cpu"), at_least)


def part(rank, size, counts, *, stand_in="first"):
    """Return one rank's microbatches, each of which is its number in the step."""
    own = share(len(counts), rank, size)
    first = 0 if stand_in == "first" else None
    return Microbatches(
        list(own), epoch=0, step=0, first=own.start, counts=counts, size=size, stand_in=first
    )


def own_part(counts, **options):
    here = world()
    return part(here.rank, here.size, counts, **options)


# --- the arithmetic ---


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.integers(1, 7),
    st.sampled_from(["own", "one", "most"]),
)
def test_over_all_ranks_each_microbatch_is_run_for_what_it_counts_and_once(counts, size, rule):
    # With a plan nothing is communicated, so ranks need no processes.
    team = [Pieces.of(part(rank, size, counts), None, sharing(rule, size)) for rank in range(size)]
    if size > 1:
        assert {pieces.total() for pieces in team} == {sum(counts)}
    run_here = [piece for pieces in team for piece in pieces.own]
    numbered = [piece for piece in run_here if piece.number is not None]
    assert [(p.microbatch, p.number, p.count) for p in numbered] == [
        (number, number, count) for number, count in enumerate(counts)
    ]
    parts = [Fraction(piece.count, sum(counts)) for piece in run_here]
    assert sum(parts) == 1
    for pieces in team:  # what stands in is the first of its own, or else of the step
        first = next((piece.number for piece in pieces.own if piece.number is not None), 0)
        stand_ins = [piece for piece in pieces.own if piece.number is None]
        assert {(piece.microbatch, piece.count) for piece in stand_ins} <= {(first, 0)}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 7))
def test_how_many_are_run_is_what_the_strategy_asks_and_its_own_come_last(counts, size):
    most = math.ceil(len(counts) / size)
    for rank in range(size):
        own = len(share(len(counts), rank, size))
        for rule, wanted in {"own": own, "one": max(own, 1), "most": most}.items():
            pieces = Pieces.of(part(rank, size, counts), None, sharing(rule, size)).own
            assert len(pieces) == wanted
            assert [piece.number is None for piece in pieces] == [True] * (wanted - own) + [
                False
            ] * own


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
    assert (found.count, found.number) == (rows, 0)
    assert found.microbatch is batch
    assert pieces.total() == rows


@pytest.mark.parametrize("batch", [torch.tensor(1.0), ["text"], 3, [torch.tensor(2), [1]]])
def test_a_batch_without_rows_asks_for_a_count(batch):
    pieces = Pieces.of(batch, None, sharing(size=1))
    text = f"must hold a tensor whose rows are its samples, but a {type(batch).__name__} has none"
    with pytest.raises(TypeError, match=text + ": pass `count`"):
        pieces.total()
    assert Pieces.of(batch, lambda _: 2, sharing(size=1)).total() == 2


@pytest.mark.parametrize(
    "number", [7, np.int64(7), np.uint8(7), torch.tensor(7), torch.tensor([7]), torch.tensor([[7]])]
)
def test_a_count_may_be_any_kind_of_integer(number):
    pieces = Pieces.of("batch", lambda _: number, sharing(size=1))
    assert pieces.total() == 7
    assert type(pieces.own[0].count) is int


@pytest.mark.parametrize(
    "number",
    [2.0, "2", None, True, np.float64(2), torch.tensor(2.0), torch.tensor([1, 2]), 2 + 0j],
    ids=repr,
)
def test_a_count_that_is_no_integer_is_refused(number):
    pieces = Pieces.of("batch", lambda _: number, sharing(size=1))
    text = f"`count` must return an integer, but returned {number!r} ({type(number).__name__})"
    with pytest.raises(TypeError, match=re.escape(text)):
        pieces.total()


def test_a_count_below_0_is_refused():
    pieces = Pieces.of("batch", lambda _: -1, sharing(size=1))
    with pytest.raises(ValueError, match="must return an integer from 0 up, but returned -1"):
        pieces.total()


@pytest.mark.parametrize("batch", ["batch", part(0, 1, [3, 3]), part(0, 1, [])])
def test_a_step_that_counts_nothing_is_refused(batch):
    pieces = Pieces.of(batch, lambda _: 0, sharing(size=1))
    with pytest.raises(ValueError, match="must count something, but all its microbatches count 0"):
        pieces.total()


@pytest.mark.parametrize("count", [None, lambda _: 2])
def test_a_loader_that_does_not_share_with_those_that_train_is_refused(count):
    batch = part(0, 1, [4, 4])
    text = "the ranks that train the model, 3, must be those that share `batch`, but it is shared"
    with pytest.raises(ValueError, match=text + " by 1: pass distributed='auto' to make_loader"):
        Pieces.of(batch, count, sharing("one", 3))


@pytest.mark.parametrize("rule", ["one", "most"])
def test_a_rank_that_must_run_one_and_has_none_at_all_is_told_what_to_give(rule):
    batch = part(2, 3, [4, 4], stand_in=None)
    assert len(batch) == 0
    text = "must have a microbatch to run where the others run one, but .*none of 2.* has none"
    with pytest.raises(ValueError, match=text + ": give it a stand_in, any microbatch of the step"):
        Pieces.of(batch, None, sharing(rule, 3))
    assert Pieces.of(batch, None, sharing("own", 3)).own == []


# --- over several ranks ---


def _totals():
    counts = [4, 4, 4, 3]
    here = world()
    batch = own_part(counts)
    tokens = Pieces.of(batch, lambda number: 100**number, sharing("one"))
    rows = Pieces.of(torch.zeros(here.rank, 2), None, sharing("one"))
    planned = Pieces.of(batch, None, sharing("one"))
    asked = []
    once = Pieces.of(batch, lambda number: asked.append(number) or 1, sharing("one"))
    return (
        [pieces.total() for pieces in (tokens, planned, tokens, once, once)],
        rows.total() if here.size > 1 else 0,
        [piece.count for piece in tokens.own],
        asked == list(batch),
    )


@pytest.mark.parametrize("size", SIZES)
def test_the_total_is_over_all_ranks_and_may_be_asked_for_again(size):
    ranks = run(_totals, world_size=size)
    tokens = 1 + 100 + 100**2 + 100**3
    for totals, rows, _, each_once in ranks:
        assert totals == [tokens, 15, tokens, 4, 4]
        assert rows == sum(range(size))
        assert each_once
    assert sum(sum(own) for _, _, own, _ in ranks) == tokens


def _one_rank_fails(what):
    here = world()

    def count(_number):
        if here.rank == here.size - 1:
            return {"raises": lambda: 1 // 0, "no integer": lambda: 1.5, "below": lambda: -2}[
                what
            ]()
        return 1

    pieces = Pieces.of(own_part([2] * here.size), count, sharing("one"))
    raised = caught(pieces.total)
    usable = torch.ones(1)
    dist.all_reduce(usable)
    again = Pieces.of(own_part([2] * here.size), lambda _: 3, sharing("one")).total()
    return raised, usable.item(), again


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("raises", "ZeroDivisionError", "division"),
        ("no integer", "TypeError", "`count` must return an integer, but returned 1.5 (float)"),
        ("below", "ValueError", "`count` must return an integer from 0 up, but returned -2"),
    ],
)
def test_an_error_in_count_on_one_rank_is_raised_on_every_rank(what, kind, text, size):
    *others, last = run(_one_rank_fails, what, world_size=size)
    for raised, usable, again in (*others, last):
        assert isinstance(raised, Raised)
        assert (usable, again) == (size, 3 * size)
    assert last[0].type == kind
    assert text in last[0].text
    for raised, _, _ in others:
        assert raised.type == "RuntimeError"
        assert "must be counted, but that failed on 1 other rank(s): see the error" in raised.text


def _nothing_counts():
    here = world()
    counted = caught(Pieces.of(own_part([2] * here.size), lambda _: 0, sharing("one")).total)
    empty = caught(Pieces.of(torch.zeros(0, 3), None, sharing("one")).total)
    some = Pieces.of(torch.zeros(int(here.rank == 0), 3), None, sharing("one")).total()
    return counted, empty, some


@pytest.mark.parametrize("size", SIZES)
def test_only_where_nothing_counts_on_any_rank_is_it_an_error(size):
    for counted, empty, some in run(_nothing_counts, world_size=size):
        for raised in (counted, empty):
            assert raised.type == "ValueError"
            assert "a step must count something, but all its microbatches count 0" in raised.text
        assert some == 1
