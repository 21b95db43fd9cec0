"""What the ranks tell each other at the end of an exact step."""

import math

import pytest
import torch
from on_ranks import run

from pardata import world
from pardata.gradient._exact_report import Largest, Report, Sameness
from pardata.gradient._fixed_point import LARGEST

CPU = torch.device("cpu")
SIZES = [1, 2, 3, 4]
NAMES = ["the loss", "a", "b", "c"]


def reported(facts, size=1):
    """Return the report where this rank says `facts`, and nothing of what they leave out."""
    seen = Largest(NAMES, CPU)
    for microbatch in facts.get("seen", []):
        for name, numbers in microbatch:
            seen.see(name, torch.tensor(numbers))
        seen.end()
    return Report.exchanged(
        seen,
        facts.get("used", set()),
        facts.get("sparse", set()),
        facts.get("late", [False, False]),
        first=facts.get("first", 2**53),
        failed=facts.get("failed", False),
        size=size,
    )


def reports(cases):
    """Return a report of each case; where it is for one rank, the last rank says it."""
    here = world()
    told = []
    for case in cases:
        own = case.get(here.rank, {}) if set(case) <= {0, 1, 2, 3} else case
        told.append(reported(own, here.size))
    return told


@pytest.mark.parametrize("size", SIZES)
def test_all_ranks_hear_what_any_says(size):
    last = size - 1
    case = {
        0: {"used": {"a"}, "first": 4},
        last: {
            "used": {"a", "c"} if last == 0 else {"c"},
            "sparse": {"b"},
            "late": [False, True],
            "failed": True,
            "first": 3,
        },
    }
    for (report,) in run(reports, [case], world_size=size):
        assert report == Report({}, set(), {"a", "c"}, {"b"}, [False, True], first=3, failed=True)


def test_where_nothing_happened_nothing_is_said():
    assert reported({}) == Report(
        {}, set(), set(), set(), [False, False], first=2**53, failed=False
    )


@pytest.mark.parametrize("size", SIZES)
def test_nan_infinity_and_what_is_too_large_are_named_on_every_rank(size):
    last = size - 1
    cases = [
        {last: {"seen": [[("b", [1.0, math.nan])]]}},
        {last: {"seen": [[("b", [1.0, -math.inf])], [("b", [0.0])]]}},
        {last: {"seen": [[("b", [-2 * LARGEST])], [("c", [3 * LARGEST])]]}},
        # A NaN is not lost beside a larger rank's number, nor beside infinity.
        {0: {"seen": [[("a", [math.inf])]]}, last: {"seen": [[("a", [math.nan, math.inf])]]}},
        {last: {"seen": [[("a", [LARGEST]), ("b", [-LARGEST])]]}},
    ]
    for told in run(reports, cases, world_size=size):
        nan, infinite, large, both, limit = (report.overflow for report in told)
        assert nan.keys() == {"b"}
        assert math.isnan(nan["b"])
        assert infinite == {"b": math.inf}
        assert large == {"b": 2 * LARGEST, "c": 3 * LARGEST}
        assert both.keys() == {"a"}
        assert math.isnan(both["a"])
        assert limit == {}  # the limit itself is allowed


def test_gradients_of_one_microbatch_for_one_parameter_count_together():
    half = 0.75 * LARGEST
    once = reported({"seen": [[("a", [half])], [("a", [half])]]})
    assert once.overflow == {}  # two microbatches: their weights sum to one
    twice = reported({"seen": [[("a", [half]), ("a", [-half])]]})
    assert twice.overflow == {"a": 1.5 * LARGEST}


def keys(cases):
    here = world()
    told = [Sameness(case.get(here.rank, 7), CPU, here.size) for case in cases]
    return [one.holds() for one in told] + [one.holds() for one in told]


@pytest.mark.parametrize("size", SIZES)
def test_whether_all_have_the_same_key_is_known_to_all(size):
    last = size - 1
    cases = [{}, {last: 8}, {last: 2**63 - 1}, dict.fromkeys(range(size), 2**63 - 1)]
    differs = size == 1
    expected = [True, differs, differs, True] * 2
    assert run(keys, cases, world_size=size) == [expected] * size
