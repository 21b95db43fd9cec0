"""What a loader with a `microbatch_size` yields."""

import pickle
import re
from collections.abc import Sequence

import pytest

from pardata import Microbatches


def microbatches(batches="abc", first=2, counts=(4, 4, 4, 4, 4, 1), **more):
    return Microbatches(batches, epoch=3, step=7, first=first, counts=counts, **more)


def test_it_is_a_sequence_of_batches_that_knows_where_it_is():
    found = microbatches()
    assert isinstance(found, Sequence)
    assert (list(found), len(found), bool(found)) == (["a", "b", "c"], 3, True)
    assert (found[0], found[-1], list(found[1:])) == ("a", "c", ["b", "c"])
    assert (found.epoch, found.step, found.first) == (3, 7, 2)
    assert found.counts == (4, 4, 4, 4, 4, 1)
    with pytest.raises(IndexError):
        found[3]
    with pytest.raises(TypeError, match="does not support item assignment"):
        found[0] = "d"


def test_it_may_be_empty_and_what_stands_in_is_none_of_its_own():
    found = microbatches([], 6, stand_in="z")
    assert (list(found), bool(found), found.stand_in) == ([], False, "z")
    assert microbatches().stand_in == microbatches(stand_in="z").stand_in == "a"
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


def test_the_batches_and_counts_are_kept_whatever_becomes_of_those_given():
    batches, counts = ["a"], [4, 4]
    found = microbatches(batches, 0, counts)
    batches.append("b")
    counts.append(4)
    assert (list(found), found.counts) == (["a"], (4, 4))
    assert list(microbatches(iter("ab"))) == ["a", "b"]


@pytest.mark.parametrize(
    ("batches", "first", "text"),
    [
        ("abc", 2, "Microbatches(epoch=3, step=7, 2 … 4 of 6)"),
        ("", 6, "Microbatches(epoch=3, step=7, none of 6)"),
    ],
)
def test_it_says_in_short_what_it_is_and_pickles(batches, first, text):
    found = microbatches(batches, first, stand_in="z", size=3, seed=5)
    there = pickle.loads(pickle.dumps(found))
    assert repr(found) == repr(there) == text
    assert (list(there), there.size, there.seed) == (list(batches), 3, 5)
    assert (there.stand_in, there.counts) == (found.stand_in, found.counts)
