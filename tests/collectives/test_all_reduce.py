"""Means, sums and gathers of trees over ranks, against a plain computation."""

import math
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import caught, run

from pardata import (
    all_gather,
    all_reduce_max,
    all_reduce_mean,
    all_reduce_min,
    all_reduce_sum,
    broadcast,
    world,
)
from pardata._pytree import map_with_path
from pardata.collectives._fingerprint import numbers_of

CALLS = (all_reduce_mean, all_reduce_sum, all_reduce_max, all_reduce_min)
EXACT = CALLS[1:]


class Metrics(NamedTuple):
    loss: object
    correct: object


def leaves(value):
    return list(numbers_of(value).values())


def rebuild(value, replacements):
    found = dict(zip(numbers_of(value), replacements, strict=True))
    return map_with_path(value, lambda path, _: found[path])


def on_every_rank(fn, size, *args):
    """Run `fn` on ranks; at size 1 without any group, as a single process has none."""
    return run(fn, *args, world_size=size) if size > 1 else [fn(*args)]


def assert_close(found, plain, tolerance=0.0):
    found = torch.as_tensor(found, dtype=torch.float64)
    torch.testing.assert_close(found, plain, rtol=tolerance, atol=tolerance)


# --- against a plain computation ---

trees = st.recursive(
    st.integers(-1000, 1000)
    | st.floats(-1e6, 1e6)
    | st.booleans()
    | st.lists(st.floats(-1e6, 1e6, width=32), max_size=4).map(torch.tensor)
    | st.just(torch.empty(0, 3)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abcdef") | st.integers(0, 9), inner, max_size=4)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2).map(OrderedDict)
        | st.builds(Metrics, inner, inner)
    ),
    max_leaves=100,
)


def _all_results(cases):
    rank, before, found = world().rank, repr(cases), []
    for values, weights in cases:
        mean = all_reduce_mean(values[rank], weight=weights[rank])
        found.append((mean, *(call(values[rank]) for call in (*EXACT, all_gather))))
    assert repr(cases) == before, "the input was changed"
    return found


def _changed(tree, draw):
    """Return a tree of the same structure with other numbers."""

    def other(leaf):
        if isinstance(leaf, torch.Tensor):
            return leaf * draw(st.integers(-3, 3))
        if isinstance(leaf, bool):
            return not leaf
        return draw(st.integers(-1000, 1000)) if isinstance(leaf, int) else leaf / 3 + 1

    return rebuild(tree, iter([other(leaf) for leaf in leaves(tree)]))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_results_are_those_of_a_plain_computation(size):
    # Collected first and reduced in one run: so many runs would take too long.
    cases = []

    @settings(max_examples=30)
    @given(st.data(), st.lists(st.integers(0, 50), min_size=size, max_size=size).filter(any))
    def collect(data, weights):
        tree = data.draw(trees)
        others = [_changed(tree, data.draw) for _ in range(size - 1)]
        cases.append(([tree, *others], weights))

    collect()
    assert len(cases) >= 30
    results = on_every_rank(_all_results, size, cases)
    for (values, weights), *of_ranks in zip(cases, *results, strict=True):
        for *reduced, gathered in of_ranks:
            assert repr(gathered) == repr([rebuild(v, iter(leaves(v))) for v in values])
            columns = map(leaves, (*values, *reduced))
            for *column, mean, total, most, least in zip(*columns, strict=True):
                plain = torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in column])
                weighed = torch.tensordot(torch.tensor(weights).double(), plain, dims=1)
                # A float32 tensor gives its mean in float32.
                assert_close(mean, weighed / sum(weights), 1e-6)
                assert_close(total, plain.sum(0), 1e-6)
                assert_close(most, plain.amax(0))
                assert_close(least, plain.amin(0))


# --- weights ---


WEIGHTS = [
    *(torch.tensor(2), torch.tensor([2.0]), np.float32(2), np.int64(2), True, Fraction(2)),
    *(torch.ones((), requires_grad=True), 1000),
]


@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_weight_may_be_any_number_or_a_tensor_of_one(weight):
    assert all_reduce_mean(0.1, weight=weight) == 0.1  # alone, to the last bit: 0.1 * 3 / 3 is not
    assert all_reduce_mean(1e308, weight=weight) == 1e308


def _weighted():
    """Return means of NaN and infinities, of which only rank 0's 2.0 counts, and with all."""
    rank = world().rank
    found = []
    for bad in (math.nan, math.inf, -math.inf):
        value = {"loss": bad if rank else 2.0, "t": torch.tensor([bad if rank else 2.0])}
        with_zero = all_reduce_mean(value, weight=0 if rank else 5)
        found.append((with_zero["loss"], with_zero["t"].item(), all_reduce_mean(value)["loss"]))
        found[-1] += (all_reduce_mean(value["loss"], weight=0 if rank else 5),)  # no tensor in it
    return found


def test_a_value_of_weight_zero_does_not_count_and_any_other_does():
    expected = [(2.0, 2.0, bad, 2.0) for bad in (math.nan, math.inf, -math.inf)]
    assert repr(run(_weighted, world_size=2)) == repr([expected] * 2)


# --- what is refused: the rank that brings it raises its own error, the others hear of it ---

# What fails between looking at a value and sending it. What is no number: tests/promises/errors.md.
REFUSED = [
    (all_reduce_mean, 10**400, "OverflowError: int too large to convert to float"),
]


def _refused(failing):
    is_bad = world().rank == failing
    return [caught(call, bad if is_bad else 1) for call, bad, _ in REFUSED], all_reduce_sum(1)


@pytest.mark.parametrize(("size", "failing"), [(1, 0), (3, 1)])
def test_an_invalid_value_on_one_rank_raises_on_every_rank(size, failing):
    for rank, (found, after) in enumerate(on_every_rank(_refused, size, failing)):
        for raised, (*_, said) in zip(found, REFUSED, strict=True):
            told = f"RuntimeError: rank {failing} failed in `all_reduce_mean`: "
            assert str(raised).startswith(("" if rank == failing else told) + said)
        assert after == size


# --- structures that differ: a table on every rank ---


# Other keys, shapes and kinds: tests/promises/errors.md.
DIFFERENT = [
    (all_reduce_mean, 1.0, torch.ones(1), "value: 1"),
    (all_reduce_max, [1.0] * 3, [1.0] * 100, "value[99]: number"),
    (all_gather, torch.ones(2), torch.ones(2).double(), "value: rows of torch.float64"),
    (all_gather, torch.ones(1), torch.tensor(1.0), "value: number of torch.float32"),
    (
        all_gather,
        {"a": [(1, torch.ones(2))]},
        {"a": [(1, torch.eye(2))]},
        "value['a'][0][1]: rowsx2",
    ),
]


def _different():
    is_odd = world().rank == 1
    return [
        (caught(call, odd if is_odd else usual), all_reduce_sum(1))
        for call, usual, odd, _ in DIFFERENT
    ]


def test_different_structures_raise_a_table_on_every_rank():
    for found in run(_different, world_size=2):
        for (raised, after), (call, *_, shown) in zip(found, DIFFERENT, strict=True):
            assert str(raised).startswith(
                f"RuntimeError: every rank must pass the same to `{call.__name__}`, but "
                f"`structure` differs:\n  rank 0: structure="
            )
            assert shown in raised.text.partition("\n  rank 1: structure=")[2]
            assert after == 2


def _same_in_other_clothes():
    rank = world().rank
    one = {"a": 1.0, "b": torch.tensor(2.0), "c": [3]}
    other = OrderedDict(c=(np.float32(3),), b=2, a=torch.tensor(1, dtype=torch.int16))
    return all_reduce_mean(other if rank else one), all_reduce_sum(other if rank else one)


def test_floats_reduce_with_tensors_and_keys_in_any_order():
    first, second = run(_same_in_other_clothes, world_size=2)
    assert repr(first[0]) == "{'a': 1.0, 'b': tensor(2.), 'c': [3.0]}"
    assert repr(dict(second[0])) == "{'c': (3.0,), 'b': 2.0, 'a': tensor(1.)}"
    assert repr(first[1]) == "{'a': 2.0, 'b': tensor(4.), 'c': [6]}"
    assert repr(dict(second[1])) == "{'c': (6.0,), 'b': 4, 'a': tensor(2)}"


def test_numpy_scalars_reduce_as_numbers_and_sizes_as_tuples():
    found = all_reduce_mean([np.array(0.5), torch.Size([1, 2])])
    assert repr(found) == "[0.5, (1.0, 2.0)]"


class Meter(Mapping):
    """A mapping of a user's own: it holds a dict, and iterates over rows, as a TensorDict does."""

    def __init__(self, items):
        self._items = dict(items)

    def keys(self):
        return self._items.keys()

    def __iter__(self):
        return iter(range(len(self._items)))

    def __getitem__(self, key):
        return self._items[key]

    def __len__(self):
        return len(self._items)


class Outputs(OrderedDict):
    """As transformers' ``ModelOutput``: its items are attributes too, and it has no ``update``."""

    def __setitem__(self, key, item):
        super().__setitem__(key, item)
        super().__setattr__(key, item)

    def update(self, *_, **__):
        raise RuntimeError("You cannot use `update` on an Outputs instance.")


class Attributes(dict):
    """Its items are its attributes."""

    def __init__(self, items):
        super().__init__(items)
        self.__dict__ = self


def _outputs(own):
    found = Outputs()
    for key in own:
        found[key] = own[key]
    return found


# How each is made, and the type of the result.
MAPPINGS = [(kind, kind) for kind in (Counter, OrderedDict, UserDict, Attributes)]
MAPPINGS += [(_outputs, Outputs), (partial(defaultdict, float), defaultdict), (Meter, dict)]


def _of_mappings():
    own, found = {"cat": world().rank + 1.0, "dog": 2.0}, []
    for make, _ in MAPPINGS:
        value = make(own)
        total = all_reduce_sum({"of": value})["of"]
        gathered = all_gather([make({name: torch.tensor(x) for name, x in own.items()})])
        assert {key: value[key] for key in value.keys()} == own  # noqa: SIM118  # rows, else
        if hasattr(value, "cat"):
            assert (value.cat, total.cat, total.dog) == (own["cat"], total["cat"], total["dog"])
        results = [total, *(each for (each,) in gathered)]
        found.append([(type(each), dict(each)) for each in results])
    return found


def test_every_kind_of_mapping_is_reduced_and_not_changed():
    expected = {"cat": 3, "dog": 4}, {"cat": 1, "dog": 2}, {"cat": 2, "dog": 2}
    for found in run(_of_mappings, world_size=2):
        assert found == [[(kind, each) for each in expected] for _, kind in MAPPINGS]


# --- dtypes ---

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def _dtypes():
    value = [torch.tensor([1, world().rank]).to(dtype) for dtype in FLOATS + WHOLE]
    return [(x.dtype, x.tolist()) for x in (*all_reduce_mean(value), *all_reduce_sum(value))]


@pytest.mark.parametrize("size", [1, 2])
def test_floats_keep_their_dtype_and_whole_numbers_have_a_wide_one(size):
    means = [(dtype, [1, 0.5 * (size - 1)]) for dtype in FLOATS + [torch.float32] * len(WHOLE)]
    sums = [(dtype, [size, size - 1]) for dtype in FLOATS + [torch.int64] * len(WHOLE)]
    assert on_every_rank(_dtypes, size) == [means + sums] * size


def _kinds_of_numbers():
    rank = world().rank
    total = all_reduce_sum([True, 2, 1.5, np.int64(3), np.float64(0.5), np.bool_(1)])
    mixed = all_reduce_sum([0.5 if rank else 1, torch.tensor(0.5) if rank else torch.tensor(1)])
    endless = all_reduce_sum([math.inf if rank else 3, math.nan if rank else 3])
    small = all_reduce_sum(torch.tensor([200, 1], dtype=torch.uint8))
    torch.set_default_dtype(torch.float64)
    return total, mixed, endless, small.tolist(), all_reduce_mean(torch.tensor([1, 2])).dtype


ROWS = torch.tensor([[math.nan, 1, -math.inf, 3.5], [2, math.nan, math.inf, -1], [0, 1, 2, -0.5]])


def _extremes():
    rank = world().rank
    row = ROWS[rank]
    whole = [rank == 0, torch.tensor([rank], dtype=torch.uint8), 2**53 - 1 - rank]
    value = row.half(), row.tolist(), whole, 0.5 if rank else 1
    return [call(value) for call in (all_reduce_max, all_reduce_min)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_extremes_keep_nan_and_whole_numbers_stay_whole(size):
    for most, least in on_every_rank(_extremes, size):
        for found, rows in ((most, ROWS[:size].amax(0)), (least, ROWS[:size].amin(0))):
            assert found[0].dtype == torch.float16
            assert repr(found[0].tolist()) == repr(found[1]) == repr(rows.tolist())
        last, top = size - 1, 2**53 - 1
        assert repr(most[2]) == repr([1, torch.tensor([last]), top])
        assert repr(least[2]) == repr([int(size == 1), torch.tensor([0]), top - last])
        assert (most[3], least[3]) == (1, 1 if size == 1 else 0.5)


def test_whole_numbers_stay_whole_unless_another_rank_brings_a_fraction():
    for total, mixed, endless, small, default in run(_kinds_of_numbers, world_size=2):
        assert repr(total) == "[2, 4, 3.0, 6, 1.0, 2]"
        assert [float(item) for item in mixed] == [1.5, 1.5]
        assert type(mixed[0]) is float
        assert repr(endless) == "[inf, nan]"
        assert small == [400, 2]  # does not wrap around
        assert default == torch.float64


def _gradients():
    rank = world().rank
    value = torch.nn.Parameter(torch.tensor([1.0, rank], dtype=torch.float64))
    results = [call(value) for call in (*CALLS, lambda x: all_gather(x)[rank])]
    for result in results:
        result.add_(1)  # a result of its own memory
    return [(type(x) is torch.Tensor, x.requires_grad) for x in results], value.detach().tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_results_carry_no_gradient_and_share_no_memory(size):
    for rank, (kinds, value) in enumerate(on_every_rank(_gradients, size)):
        assert kinds == [(True, False)] * 5
        assert value == [1.0, rank]


# --- large whole numbers ---


# Of the second the sums may be rounded in float64, which is an error on every rank.
EXACT_SUMS = [(2**53 - 2, 1), (-(2**53) + 2, -1), (2**53 - 1, -(2**53) + 1)]
INEXACT_SUMS = [(2**53 - 1, 1), (-(2**53), 0), (2**60 + 1, -(2**60))]


def _large(make):
    cases = [make(case[world().rank]) for case in EXACT_SUMS + INEXACT_SUMS]
    return [caught(all_reduce_sum, number) for number in cases]


@pytest.mark.parametrize("make", [int, torch.tensor])
def test_integer_sums_are_exact_or_raise_beyond_2_to_the_53(make):
    for *exact, one, two, three in run(_large, make, world_size=2):
        assert exact == [sum(case) for case in EXACT_SUMS]
        for raised in (one, two, three):
            assert "whole numbers and their sum must be below 2**53 to be exact, but" in raised.text


# --- all_gather ---


def _views():
    rank = world().rank
    grid = torch.arange(6.0).reshape(3, 2) + rank
    # One row of a column has a stride but counts as contiguous.
    views = [grid[:1, 1], grid[:, 1], grid.T, torch.ones(1).expand(3), torch.tensor([1j]).imag]
    views.append(torch.tensor([1 + 2j]).conj().imag)
    of_all = [all_gather(view)[rank] for view in views]
    # The mean of a rank's number and the next one's is half more than the first.
    of_all += [all_reduce_mean(view) + rank - 0.5 for view in views[:3]]
    return [torch.equal(*pair) for pair in zip(of_all, [*views, *views[:3]], strict=True)]


def test_views_of_any_stride_are_read():
    assert run(_views, world_size=2) == [[True] * 9] * 2


def _values(rank):
    """Return what differs in rows; any part without tensors is one thing."""
    return [
        {"rows": torch.full((rank, 2), float(rank)), "none": torch.empty(rank % 2, 0)},
        [torch.arange(3 - rank, dtype=torch.int16), rank, rank / 2, rank == 1],
        (torch.ones(2 * rank, dtype=torch.bool), torch.tensor(rank, dtype=torch.float64)),
        torch.full((rank + 1,), 0.5, dtype=torch.bfloat16),
        ["a"] * rank,
        None,
        {"names": ["x"] * rank, "rows": torch.ones(rank, 2), "n": rank},
        ({"set": {1, rank}} if rank else "text", 1j),
    ]


def _gathered():
    return [all_gather(value) for value in _values(world().rank)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tensors_of_different_numbers_of_rows_and_texts_are_gathered(size):
    expected = [list(column) for column in zip(*map(_values, range(size)), strict=True)]
    for found in on_every_rank(_gathered, size):
        assert repr(found) == repr(expected)  # with types, dtypes and shapes


# --- broadcast


SENT = [
    *("text", None, 2**70, 1j, {"a": [1, ("b", {2})]}, torch.Size([2])),
    *(torch.arange(6).reshape(2, 3).T.to(dtype) for dtype in (*FLOATS, *WHOLE, torch.complex64)),
    *(torch.empty(0, 3), torch.ones(300_000), [torch.eye(2)], np.float32(0.5)),
]


def _broadcast():
    rank = world().rank
    return [broadcast(value if rank == 0 else f"of {rank}") for value in SENT]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_all_get_what_rank_0_has(size):
    for found in on_every_rank(_broadcast, size):
        assert repr(found) == repr(SENT)


# --- what is on a GPU: tests/gpu/test_ranks_gpu.py


def test_a_loss_that_carries_a_gradient_is_reduced_without_a_warning():
    loss = torch.ones(2, requires_grad=True).sum()
    torch.set_warn_always(True)  # else only the first one in a process is heard
    try:
        assert all_reduce_mean(loss).item() == 2
    finally:
        torch.set_warn_always(False)
