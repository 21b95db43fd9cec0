"""What each microbatch of a step counts, and all of them together, over all ranks."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pardata import Microbatches, backward
from pardata.data._plan import share
from pardata.gradient._count import Pieces, Sharing


class One(Sharing):
    least = 1


class Most(Sharing):
    equally_many = True


RULES = {"own": Sharing, "one": One, "most": Most}


def sharing(rule, size):
    """Return how the ranks run microbatches: by the rules of the strategies."""
    made = RULES[rule]()
    made.size = size
    return made


def part(rank, size, counts, *, placeholder="first"):
    """Return one rank's microbatches, of which each row is its number in the step."""
    own = share(len(counts), rank, size)
    batches = [torch.full((count,), number) for number, count in enumerate(counts)]
    first = batches[0] if placeholder == "first" else None
    return Microbatches(
        batches[own.start : own.stop],
        epoch=0,
        step=0,
        first=own.start,
        counts=counts,
        size=size,
        placeholder=first,
    )


def number_of(piece):
    return int(piece.microbatch[0])


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
        is_placeholder = [piece.number < 0 for piece in pieces.own]
        assert is_placeholder == [True] * (wanted - own) + [False] * own
        first = next((piece.number for piece in pieces.own if piece.number >= 0), 0)
        placeholders = {(number_of(p), p.count) for p in pieces.own if p.number < 0}
        assert placeholders <= {(first, 0)}
        assert pieces.most == most
        assert size == 1 or pieces.expected() == sum(counts)
    run_here = [piece for pieces in team for piece in pieces.own]
    numbered = [(number_of(p), p.number, p.count) for p in run_here if p.number >= 0]
    assert numbered == [(number, number, count) for number, count in enumerate(counts)]
    assert sum(Fraction(piece.count, sum(counts)) for piece in run_here) == 1


def loss_with(count):
    return backward(
        nn.Linear(2, 1), lambda model, x: model(x).mean(), torch.ones(3, 2), count=count
    )


@pytest.mark.parametrize(
    "number", [7, np.int64(7), np.uint8(7), torch.tensor(7), torch.tensor([7])]
)
def test_a_count_may_be_any_kind_of_integer(number):
    assert loss_with(lambda _: number).isfinite()


@pytest.mark.parametrize(
    "number", [2.0, "2", None, True, np.float64(2), torch.tensor([1, 2]), 2 + 0j], ids=repr
)
def test_a_count_that_is_no_integer_is_refused(number):
    text = (
        r"`count\(microbatch\)` must be an integer of at least 0, but is |only integer tensors of a"
    )
    with pytest.raises(TypeError, match=text):
        loss_with(lambda _: number)


def test_in_one_process_what_each_step_counts_is_looked_at_and_the_loss_is_its_mean():
    net, seen = nn.Linear(2, 1), []
    batch = torch.ones(3, 2)

    def step(number):
        def count(microbatch):
            seen.append(len(microbatch))
            return number

        return backward(net, lambda model, x: model(x).mean(), batch, count=count)

    assert step(7).item() == step(2).item() == net(batch).mean().item()
    for number, text in ((0, "a step must count something"), (-1, "of at least 0, but is -1")):
        with pytest.raises(ValueError, match=text):
            step(number)
    assert seen == [3] * 4


@pytest.mark.parametrize("rule", ["one", "most"])
def test_a_rank_that_must_run_one_and_has_none_at_all_is_told_what_to_give(rule):
    batch = part(2, 3, [4, 4], placeholder=None)
    assert len(batch) == 0
    text = "must have a microbatch to run where the others run one, but .*none of 2.* has none"
    with pytest.raises(
        ValueError, match=text + ": give it a placeholder, any microbatch of the step"
    ):
        Pieces.of(batch, None, sharing(rule, 3))
    assert Pieces.of(batch, None, sharing("own", 3)).own == []
