"""What a loader with a `microbatch_size` yields."""

import pickle
import re
from collections.abc import Sequence

import pytest

from pardata import Microbatches


def microbatches(batches="abc", first=2, counts=(4, 4, 4, 4, 4, 1), **more):
    return Microbatches(batches, epoch=3, step=7, first=first, counts=counts, **more)


def test_it_is_a_sequence_of_batches():
    found = microbatches()
    assert isinstance(found, Sequence)
    assert list(found) == ["a", "b", "c"]
    assert len(found) == 3
    assert found
    assert (found[0], found[-1]) == ("a", "c")
    assert list(found[1:]) == ["b", "c"]
    assert list(reversed(found)) == ["c", "b", "a"]
    assert "b" in found
    assert found.index("c") == 2
    with pytest.raises(IndexError):
        found[3]


def test_it_may_be_empty():
    found = microbatches([], 6)
    assert list(found) == []
    assert not found
    with pytest.raises(IndexError):
        found[0]


def test_it_knows_where_it_is():
    found = microbatches()
    assert (found.epoch, found.step, found.first) == (3, 7, 2)
    assert found.counts == (4, 4, 4, 4, 4, 1)


def test_it_knows_the_seed_and_how_many_ranks_share_the_step():
    assert (microbatches().seed, microbatches().size) == (0, 1)
    found = microbatches(seed=5, size=3)
    assert (found.seed, found.size) == (5, 3)


def test_its_first_stands_in_or_else_what_it_was_given():
    assert microbatches().stand_in == "a"
    assert microbatches(stand_in="z").stand_in == "a"
    assert microbatches([], stand_in="z").stand_in == "z"
    assert microbatches([]).stand_in is None


@pytest.mark.parametrize(
    ("batches", "first", "counts"), [("abc", 0, (4, 4)), ("a", 2, (4, 4)), ("a", -1, (4, 4))]
)
def test_counts_that_do_not_cover_its_microbatches_are_refused(batches, first, counts):
    text = (
        f"`counts` must have a number for each microbatch of the step, over all ranks, but has 2, "
        f"and here are {len(batches)} from number {first} on"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        microbatches(batches, first, counts)


def test_what_stands_in_is_none_of_its_own():
    found = microbatches([], 6, stand_in="z")
    assert list(found) == []
    assert "z" not in found
    assert not found


def test_the_batches_and_counts_are_kept_whatever_becomes_of_those_given():
    batches, counts = ["a"], [4, 4]
    found = microbatches(batches, 0, counts)
    batches.append("b")
    counts.append(4)
    assert list(found) == ["a"]
    assert found.counts == (4, 4)
    assert list(microbatches(iter("ab"))) == ["a", "b"]


def test_it_cannot_be_changed_by_accident():
    with pytest.raises(TypeError, match=re.escape("does not support item assignment")):
        microbatches()[0] = "d"


@pytest.mark.parametrize(
    ("batches", "first", "text"),
    [
        ("abc", 2, "Microbatches(epoch=3, step=7, 2 … 4 of 6)"),
        ("a", 0, "Microbatches(epoch=3, step=7, 0 … 0 of 6)"),
        ("", 6, "Microbatches(epoch=3, step=7, none of 6)"),
    ],
)
def test_it_says_in_short_what_it_is(batches, first, text):
    assert repr(microbatches(batches, first)) == text


def test_it_pickles():
    found = pickle.loads(pickle.dumps(microbatches()))
    assert list(found) == ["a", "b", "c"]
    assert repr(found) == repr(microbatches())
    assert found.counts == microbatches().counts
    empty = pickle.loads(pickle.dumps(microbatches([], stand_in="z", size=3, seed=5)))
    assert (list(empty), empty.stand_in, empty.size, empty.seed) == ([], "z", 3, 5)
