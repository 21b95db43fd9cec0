"""Means, sums and gathers of trees over ranks, against a plain computation."""

import copy
import math
import re
from collections import OrderedDict
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import Raised, caught, run, run_caught

from pardata import all_gather, all_reduce_mean, all_reduce_sum
from pardata.collective._numbers import numbers_of
from pardata.collective._reduction import (
    _as_tensor,
    _from_bytes,
    _pack,
    _sum_like,
    _to_bytes,
    _unpack,
)
from pardata.collective._tree import rebuilt


def leaves(value):
    return list(numbers_of(value).values())


def rebuild(value, replacements):
    return rebuilt(value, dict(zip(numbers_of(value), replacements, strict=True)))


class Metrics(NamedTuple):
    loss: object
    correct: object


def rank_and_size():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def on_every_rank(fn, size, *args):
    """Run `fn` on ranks; at size 1 without any group, as a single process has none."""
    return run(fn, *args, world_size=size) if size > 1 else [fn(*args)]


def assert_close(found, plain, **tolerances):
    found = torch.as_tensor(found, dtype=torch.float64)
    torch.testing.assert_close(found, plain, **tolerances)


# --- against a plain computation ---


def _rank_values(rank):
    return {
        "number": 1.5 + rank,
        "whole": 3 * rank + 1,
        "flag": rank == 0,
        "list": [torch.tensor([1.0, rank]), (torch.tensor(rank + 0.5, dtype=torch.float64),)],
        "named": Metrics(torch.tensor([[rank, 2], [3, 4]]), np.float32(rank)),
    }


def _mean_sum_and_gather():
    rank, _ = rank_and_size()
    value = _rank_values(rank)
    before = copy.deepcopy(value)
    results = (
        all_reduce_mean(value, weight=rank + 1),
        all_reduce_sum(value),
        all_gather(value),
    )
    assert repr(value) == repr(before), "the input was changed"
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_means_sums_and_gathers_are_those_of_a_plain_computation(size):
    values = [_rank_values(rank) for rank in range(size)]
    weights = [rank + 1 for rank in range(size)]
    for mean, total, gathered in on_every_rank(_mean_sum_and_gather, size):
        for i, (m, t) in enumerate(zip(leaves(mean), leaves(total), strict=True)):
            column = [torch.as_tensor(leaves(v)[i], dtype=torch.float64) for v in values]
            plain = sum(w * c for w, c in zip(weights, column, strict=True)) / sum(weights)
            assert_close(m, plain, rtol=1e-7, atol=0)
            assert_close(t, sum(column), rtol=0, atol=0)
        assert type(mean["named"]) is Metrics
        assert type(mean["list"]) is list
        assert type(mean["list"][1]) is tuple
        assert list(mean) == list(values[0])
        assert repr(gathered) == repr([rebuild(v, iter(leaves(v))) for v in values])


trees = st.recursive(
    st.integers(-1000, 1000)
    | st.floats(-1e6, 1e6)
    | st.booleans()
    | st.lists(st.floats(-1e6, 1e6, width=32), max_size=4).map(torch.tensor),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from("abcdef"), inner, max_size=4)
        | st.builds(Metrics, inner, inner)
    ),
    max_leaves=100,
)


def _all_trees(cases):
    rank, _ = rank_and_size()
    return [
        (all_reduce_mean(case[rank], weight=weights[rank]), all_reduce_sum(case[rank]))
        for case, weights in cases
    ]


def _changed(tree, draw):
    """Return a tree of the same structure with other numbers."""

    def other(leaf):
        if isinstance(leaf, torch.Tensor):
            return leaf * draw(st.integers(-3, 3))
        if isinstance(leaf, bool):
            return not leaf
        return draw(st.integers(-1000, 1000)) if isinstance(leaf, int) else leaf / 3 + 1

    return rebuild(tree, iter([other(leaf) for leaf in leaves(tree)]))


def test_trees_of_all_shapes_at_two_ranks():
    # Collected first and reduced in one run: a hundred runs would take too long.
    cases = []

    @given(st.data(), st.tuples(st.integers(1, 50), st.integers(0, 50)))
    def collect(data, weights):
        tree = data.draw(trees)
        cases.append(((tree, _changed(tree, data.draw)), weights))

    collect()
    assert len(cases) >= 100
    results = run(_all_trees, cases, world_size=2)
    for (case, weights), *reduced in zip(cases, *results, strict=True):
        columns = list(zip(*(leaves(tree) for tree in case), strict=True))
        for mean, total in reduced:
            for column, m, t in zip(columns, leaves(mean), leaves(total), strict=True):
                one, other = (torch.as_tensor(leaf, dtype=torch.float64) for leaf in column)
                plain = (one * weights[0] + other * weights[1]) / sum(weights)
                # A float32 tensor gives its mean in float32.
                close = {"rtol": 1e-6, "atol": 1e-6}
                assert_close(m, plain, **close)
                assert_close(t, one + other, **close)


@given(trees)
def test_alone_the_mean_the_sum_and_the_gather_are_the_value_itself(tree):
    floats = [float(x) if not isinstance(x, torch.Tensor) else x for x in leaves(tree)]
    expected = rebuild(tree, iter(floats))
    assert repr(all_reduce_mean(tree, weight=3)) == repr(expected)
    sums = [int(x) if isinstance(x, bool) else x for x in leaves(tree)]
    assert repr(all_reduce_sum(tree)) == repr(rebuild(tree, iter(sums)))
    assert repr(all_gather(tree)) == repr([rebuild(tree, iter(leaves(tree)))])


def test_alone_the_mean_is_exact_whatever_the_weight():
    # 0.1 * 3 / 3 is not 0.1.
    assert all_reduce_mean(0.1, weight=3) == 0.1
    assert all_reduce_mean(1e308, weight=1000) == 1e308


# --- weights ---


def _masked(bads):
    rank, _ = rank_and_size()
    found = []
    for bad in bads:
        value = {"loss": bad if rank else 2.0, "t": torch.tensor([bad if rank else 4.0, bad])}
        with_zero = all_reduce_mean(value, weight=0 if rank else 5)
        with_one = all_reduce_mean(value)
        found.append((with_zero["loss"], with_zero["t"][0].item(), with_one["loss"]))
    return found


def test_a_value_of_weight_zero_does_not_count_and_any_other_does():
    bads = [math.nan, math.inf, -math.inf]
    for found in run(_masked, bads, world_size=2):
        for bad, (hidden, hidden_in_tensor, seen) in zip(bads, found, strict=True):
            assert (hidden, hidden_in_tensor) == (2.0, 4.0)
            assert repr(seen) == repr(bad)


def _all_zero():
    return caught(all_reduce_mean, 1.0, 0), all_reduce_mean(2.0)


@pytest.mark.parametrize("size", [1, 3])
def test_if_all_weights_are_zero_every_rank_is_told(size):
    for raised, after in on_every_rank(_all_zero, size):
        assert (raised.type, raised.text) == (
            "ValueError",
            "`weight` must be positive on at least one rank, but is 0 on all: nothing was counted",
        )
        assert after == 2.0


@pytest.mark.parametrize(
    "weight", [torch.tensor(2), torch.tensor([2.0]), np.float32(2), np.int64(2), True, Fraction(2)]
)
def test_a_weight_may_be_any_number_or_a_tensor_of_one(weight):
    assert all_reduce_mean(3.0, weight=weight) == 3.0


def test_a_weight_that_requires_a_gradient_is_read():
    assert all_reduce_mean(3.0, weight=torch.ones((), requires_grad=True)) == 3.0


BAD_WEIGHTS = [
    (-1, "ValueError", "`weight` must be a finite number that is not negative, but is -1.0"),
    (math.nan, "ValueError", "`weight` must be a finite number that is not negative, but is nan"),
    (math.inf, "ValueError", "`weight` must be a finite number that is not negative, but is inf"),
    ("5", "TypeError", "`weight` must be one number, but is '5' (str)"),
    (None, "TypeError", "`weight` must be one number, but is None (NoneType)"),
    ([1], "TypeError", "`weight` must be one number, but is [1] (list)"),
    (torch.ones(2), "TypeError", "`weight` must be one number, but is tensor([1., 1.]) (Tensor)"),
    (torch.tensor(1j), "TypeError", "`weight` must be one number, but is 1j (complex)"),
    (10**400, "OverflowError", "int too large to convert to float"),
]


def _bad_weights(failing):
    rank, _ = rank_and_size()
    found = [
        caught(all_reduce_mean, {"a": 1.0}, weight if rank == failing else 1)
        for weight, _, _ in BAD_WEIGHTS
    ]
    return found, all_reduce_sum(1)


@pytest.mark.parametrize(("size", "failing"), [(1, 0), (2, 0), (3, 1)])
def test_a_bad_weight_on_one_rank_is_raised_on_every_rank(size, failing):
    for rank, (found, after) in enumerate(on_every_rank(_bad_weights, size, failing)):
        for raised, (_, kind, text) in zip(found, BAD_WEIGHTS, strict=True):
            if rank == failing:
                assert (raised.type, raised.text) == (kind, text)
            else:
                assert raised.type == "RuntimeError"
                assert f"rank {failing} failed in" in raised.text
                assert f"{kind}: {text}" in raised.text
        assert after == size  # the group is usable after all of them


# --- values that are refused ---

BAD_VALUES = [
    ("x", "`value` must be a number or a tensor, but is 'x' (str)"),
    ({"loss": [1, 2, None]}, "`value['loss'][2]` must be a number or a tensor, but is None"),
    ([torch.ones(2, dtype=torch.complex64)], "`value[0]` must be a dense tensor of real numbers"),
    ([torch.eye(2).to_sparse()], "but is a torch.sparse_coo Tensor: convert it first"),
]


def _bad_values(failing):
    rank, _ = rank_and_size()
    found = [
        caught(call, bad if rank == failing else 1.0)
        for call in (all_reduce_mean, all_reduce_sum, all_gather)
        for bad, _ in BAD_VALUES
    ]
    return found, all_gather(rank)


@pytest.mark.parametrize(("size", "failing"), [(1, 0), (2, 0), (3, 2)])
def test_a_leaf_that_is_no_number_is_raised_on_every_rank_by_its_path(size, failing):
    for rank, (found, after) in enumerate(on_every_rank(_bad_values, size, failing)):
        for raised, (_, text) in zip(found, BAD_VALUES * 3, strict=True):
            assert raised.type == ("TypeError" if rank == failing else "RuntimeError")
            assert text in raised.text
        assert after == list(range(size))


def _unreadable(failing):
    rank, _ = rank_and_size()
    bad = rank == failing
    found = [
        caught(all_reduce_mean, 10**400 if bad else 1),
        caught(all_reduce_mean, torch.empty(2, device="meta") if bad else torch.ones(2)),
        caught(all_gather, 2**63 if bad else 1),
    ]
    return [result.type for result in found], all_reduce_mean(1.0)


@pytest.mark.parametrize("size", [3])
def test_a_value_that_cannot_be_read_is_raised_on_every_rank(size):
    # Whatever fails between looking at a value and sending it: the others must not wait.
    results = run(_unreadable, 1, world_size=size, timeout=30)
    assert results[0] == (["RuntimeError"] * 3, 1.0)
    assert results[1][0][:2] == ["OverflowError", "NotImplementedError"]


# --- structures that differ ---


def _different():
    rank, _ = rank_and_size()
    odd = rank == 1
    deep = {"a": {"b": [{"c": (1.0, 2.0, 3.0 if odd else torch.ones(2))}]}}
    cases = {
        "key": {"loss": 1.0, **({"extra": 1.0} if odd else {})},
        "length": [1.0] * (3 if odd else 2),
        "many": [1.0] * (100 if odd else 3),
        "shape": torch.ones(3, 2) if odd else torch.ones(2, 3),
        "vector": torch.ones(1) if odd else 1.0,
        "nesting": [[1.0]] if odd else [1.0],
        "deep": deep,
        "nothing": [] if odd else 1.0,
    }
    found = {}
    for name, value in cases.items():
        for call in (all_reduce_mean, all_reduce_sum, all_gather):
            if name == "shape" and call is all_gather:
                continue
            found[f"{name}, {call.__name__}"] = (caught(call, value), all_reduce_sum(rank))
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_structures_that_differ_are_a_table_on_every_rank_and_the_group_stays_usable(size):
    total = sum(range(size))
    results = run(_different, world_size=size)
    for found in results:
        assert len(found) == 23
        for name, (raised, after) in found.items():
            assert isinstance(raised, Raised), name
            assert raised.type == "RuntimeError", name
            assert "every rank must pass the same to `all_reduce or all_gather`" in raised.text
            assert "but `structure` differ" in raised.text
            others = ", ".join(str(rank) for rank in range(size) if rank != 1)
            assert f"\n  rank {others}: structure=" in raised.text
            assert "\n  rank 1: structure=" in raised.text
            assert "Make the same call with the same structure on every rank." in raised.text
            assert after == total
    text = results[0]["key, all_reduce_mean"][0].text
    assert "rank 1: structure=\"value['extra']: number; value['loss']: number\"" in text
    text = results[0]["deep, all_reduce_sum"][0].text
    assert "value['a']['b'][0]['c'][2]: 2" in text
    text = results[0]["shape, all_reduce_mean"][0].text
    assert "structure='value: 2x3'" in text
    assert "structure='value: 3x2'" in text


def _different_calls():
    rank, _ = rank_and_size()
    mean_or_sum = caught(all_reduce_sum if rank else all_reduce_mean, 1.0)
    mean_or_gather = caught(all_gather if rank else all_reduce_mean, 1.0)
    return mean_or_sum, mean_or_gather, all_reduce_sum(1)


@pytest.mark.parametrize("size", [3])
def test_different_calls_are_a_table_on_every_rank(size):
    for first, second, after in run(_different_calls, world_size=size):
        assert "but `call` differ:\n  rank 0: call='all_reduce_mean'\n" in first.text
        others = ", ".join(map(str, range(1, size)))
        assert f"\n  rank {others}: call='all_reduce_sum'\n" in first.text
        assert "call='all_gather'" in second.text
        assert after == size


def _same_in_other_clothes():
    rank, _ = rank_and_size()
    one = {"a": 1.0, "b": torch.tensor(2.0), "c": [3]}
    other = OrderedDict(c=(np.float32(3),), b=2, a=torch.tensor(1, dtype=torch.int16))
    return all_reduce_mean(other if rank else one), all_reduce_sum(other if rank else one)


def test_a_float_meets_a_tensor_and_the_order_of_keys_does_not_matter():
    first, second = run(_same_in_other_clothes, world_size=2)
    assert repr(first[0]) == "{'a': 1.0, 'b': tensor(2.), 'c': [3.0]}"
    assert repr(dict(second[0])) == "{'c': (3.0,), 'b': 2.0, 'a': tensor(1.)}"
    assert repr(first[1]) == "{'a': 2.0, 'b': tensor(4.), 'c': [6]}"
    assert repr(dict(second[1])) == "{'c': (6.0,), 'b': 4, 'a': tensor(2)}"


# --- how many collectives ---


def _counted():
    counts = []
    real = dist.all_reduce

    def counting(*args, **kwargs):
        counts[-1] += 1
        return real(*args, **kwargs)

    dist.all_reduce = counting
    for value in ([1.0] * 57, [1.0] * 58, torch.ones(57), torch.ones(5000), {}, 1.0):
        for call in (all_reduce_mean, all_reduce_sum):
            counts.append(0)
            result = call(value)
            assert len(leaves(result)) == len(leaves(value))
    return counts


def test_up_to_57_numbers_take_one_collective_and_more_take_two():
    assert run(_counted, world_size=2) == [[1, 1, 2, 2, 1, 1, 2, 2, 1, 1, 1, 1]] * 2


LENGTHS = [0, 1, 56, 57, 58, 59, 200]


def _long():
    rank, _ = rank_and_size()
    found = []
    for count in LENGTHS:
        value = torch.arange(count, dtype=torch.float64) * (rank + 1)
        found.append(
            (all_reduce_mean(value), all_reduce_sum(value), all_reduce_mean(value, weight=rank))
        )
    return found


def test_values_on_both_sides_of_the_header_arrive():
    for found in run(_long, world_size=2):
        for count, (mean, total, second) in zip(LENGTHS, found, strict=True):
            plain = torch.arange(count, dtype=torch.float64)
            assert torch.equal(mean, plain * 1.5)
            assert torch.equal(total, plain * 3)
            assert torch.equal(second, plain * 2)


# --- dtypes ---

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def _dtypes():
    rank, _ = rank_and_size()
    value = {str(dtype): torch.tensor([1, rank]).to(dtype) for dtype in FLOATS + WHOLE}
    return all_reduce_mean(value), all_reduce_sum(value), all_gather(value)


@pytest.mark.parametrize("size", [1, 2])
def test_dtypes(size):
    for mean, total, gathered in on_every_rank(_dtypes, size):
        for dtype in FLOATS:
            assert mean[str(dtype)].dtype == total[str(dtype)].dtype == dtype
        for dtype in WHOLE:
            assert mean[str(dtype)].dtype == torch.float32
            assert total[str(dtype)].dtype == torch.int64
        for dtype in FLOATS + WHOLE:
            assert mean[str(dtype)].tolist() == [1, 0.5 * (size - 1)]
            assert total[str(dtype)].tolist() == [size, size - 1]
            for rank in range(size):
                assert gathered[rank][str(dtype)].dtype == dtype
                assert gathered[rank][str(dtype)].tolist() == [1, rank]


def _default_dtype():
    torch.set_default_dtype(torch.float64)
    return all_reduce_mean(torch.tensor([1, 2])).dtype


def test_whole_tensors_become_the_default_dtype():
    assert run(_default_dtype, world_size=2) == [torch.float64] * 2


def _small_integers():
    return all_reduce_sum(torch.tensor([200, 1], dtype=torch.uint8)).tolist()


def test_a_sum_of_small_integers_does_not_wrap_around():
    assert run(_small_integers, world_size=2) == [[400, 2]] * 2


def _kinds_of_numbers():
    rank, _ = rank_and_size()
    total = all_reduce_sum([True, 2, 1.5, np.int64(3), np.float64(0.5), np.bool_(1)])
    mixed = all_reduce_sum([0.5 if rank else 1, torch.tensor(0.5) if rank else torch.tensor(1)])
    return total, [type(item) for item in total], mixed


def test_whole_numbers_stay_whole_unless_another_rank_brings_a_fraction():
    for total, kinds, mixed in run(_kinds_of_numbers, world_size=2):
        assert total == [2, 4, 3.0, 6, 1.0, 2]
        assert kinds == [int, int, float, int, float, int]
        assert mixed == [1.5, torch.tensor(1.5, dtype=torch.float64)]
        assert type(mixed[0]) is float


def _gradients():
    rank, _ = rank_and_size()
    value = torch.nn.Parameter(torch.tensor([1.0, rank]))
    results = [all_reduce_mean(value), all_reduce_sum(value), *all_gather(value)]
    results[0].add_(1)  # a result of its own memory
    results[2].add_(1)
    return [(type(x) is torch.Tensor, x.requires_grad) for x in results], value.detach().tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_results_carry_no_gradient_and_share_no_memory(size):
    for rank, (kinds, value) in enumerate(on_every_rank(_gradients, size)):
        assert kinds == [(True, False)] * (2 + size)
        assert value == [1.0, rank]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
@pytest.mark.parametrize("call", [all_reduce_mean, all_reduce_sum, lambda x: all_gather(x)[0]])
def test_alone_too_the_result_has_memory_of_its_own(call, dtype):
    value = torch.ones(2, dtype=dtype)
    call(value).zero_()
    assert value.tolist() == [1, 1]


@pytest.mark.parametrize("call", [all_reduce_mean, all_reduce_sum])
def test_views_of_any_stride_are_read(call):
    grid = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(call(grid.T), grid.T)
    assert torch.equal(call(grid[:, 1]), grid[:, 1])
    assert torch.equal(call(torch.ones(1).expand(3)), torch.ones(3))


def _empties():
    found = []
    for call in (all_reduce_mean, all_reduce_sum, all_gather):
        found += [call(value) for value in ({}, [], (), {"a": []}, torch.empty(0, 3))]
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_empty_structures_and_tensors_stay_empty(size):
    for found in on_every_rank(_empties, size):
        assert found[:4] == found[5:9] == [{}, [], (), {"a": []}]
        assert found[4].shape == found[9].shape == (0, 3)
        assert found[10:14] == [[{}] * size, [[]] * size, [()] * size, [{"a": []}] * size]
        assert [part.shape for part in found[14]] == [(0, 3)] * size


# --- large whole numbers ---


def _large(cases):
    rank, _ = rank_and_size()
    return [
        (caught(all_reduce_sum, case[rank]), caught(all_reduce_sum, torch.tensor(case[rank])))
        for case in cases
    ]


def test_sums_of_whole_numbers_below_2_to_the_53_are_exact():
    cases = [(2**53 - 2, 1), (-(2**53) + 2, -1), (2**53 - 1, -(2**53) + 1)]
    for found in run(_large, cases, world_size=2):
        for case, (number, tensor) in zip(cases, found, strict=True):
            assert number == sum(case)
            assert int(tensor) == sum(case)


def test_sums_that_float64_may_round_are_an_error_on_every_rank():
    cases = [(2**53 - 1, 1), (-(2**53), 0), (2**60 + 1, -(2**60))]
    for found in run(_large, cases, world_size=2):
        assert len(found) == 3
        for raised in (raised for pair in found for raised in pair):
            assert "whole numbers and their sum must be below 2**53 to be exact, but" in raised.text
            assert "bits: pass it as a float" in raised.text


def test_the_limit_alone():
    assert all_reduce_sum(2**53 - 1) == 2**53 - 1
    assert all_reduce_sum(float(2**53)) == 2**53
    text = "must be below 2**53 to be exact, but one has 54 bits: pass it as a float"
    for value in (2**53, 2**53 + 1, -(2**53), torch.tensor([1, 2**53 + 1])):
        with pytest.raises(OverflowError, match=re.escape(text)):
            all_reduce_sum(value)


def test_the_input_of_an_infinite_sum_elsewhere_is_no_overflow():
    # What an integer here and an infinity on another rank add up to.
    assert _sum_like(3, torch.tensor(math.inf, dtype=torch.float64)) == math.inf
    assert math.isnan(_sum_like(3, torch.tensor(math.nan, dtype=torch.float64)))


# --- all_gather ---


def _uneven():
    rank, _ = rank_and_size()
    value = {
        "rows": torch.full((rank, 2), float(rank)),
        "text": [torch.arange(3 - rank, dtype=torch.int16), rank, rank / 2, rank == 1],
        "none": torch.empty(rank % 2, 0),
        "flags": torch.ones(2 * rank, dtype=torch.bool),
        "half": torch.full((rank + 1,), 0.5, dtype=torch.bfloat16),
        "scalar": torch.tensor(rank, dtype=torch.float64),
    }
    return value, all_gather(value)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tensors_with_different_numbers_of_rows_are_gathered(size):
    results = on_every_rank(_uneven, size)
    values = [value for value, _ in results]
    for _, gathered in results:
        assert len(gathered) == size
        for own, back in zip(values, gathered, strict=True):
            for one, other in zip(leaves(own), leaves(back), strict=True):
                assert type(one) is type(other)
                if isinstance(one, torch.Tensor):
                    assert one.dtype == other.dtype
                    assert one.shape == other.shape
                    assert torch.equal(one, other)
                else:
                    assert one == other


def _strides():
    rank, _ = rank_and_size()
    grid = torch.arange(6.0).reshape(3, 2) + rank
    # One row of a column has a stride but counts as contiguous.
    views = [grid[:1, 1], grid[:, 1], grid.T, torch.ones(1).expand(3), torch.tensor([1j]).imag]
    views.append(torch.tensor([1 + 2j]).conj().imag)
    return [[x.tolist() for x in all_gather(view)] for view in views]


@pytest.mark.parametrize("size", [1, 2])
def test_views_of_any_stride_are_gathered(size):
    for column, *_, flipped in on_every_rank(_strides, size):
        assert column == [[1.0 + rank] for rank in range(size)]
        assert flipped == [[-2.0]] * size


def _gathered_differently():
    rank, _ = rank_and_size()
    pairs = [
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2, 3), torch.ones(2, 4)),
        (torch.ones(2), torch.ones(2, 1)),
        (1, 1.0),
        (True, 1),
        (torch.ones(1), torch.tensor(1.0)),
    ]
    return [caught(all_gather, pair[rank]) for pair in pairs], all_gather(rank)


def test_dtypes_and_other_dimensions_that_differ_are_a_table_on_every_rank():
    for found, after in run(_gathered_differently, world_size=2):
        for raised in found:
            assert raised.type == "RuntimeError"
            assert "every rank must pass the same to `all_reduce or all_gather`" in raised.text
        assert "structure='value: rows of torch.float32'" in found[0].text
        assert "structure='value: rows of torch.float64'" in found[0].text
        assert "structure='value: rowsx3 of torch.float32'" in found[1].text
        assert "structure='value: number of torch.float32'" in found[5].text
        assert after == [0, 1]


@given(trees)
def test_bytes_and_back_are_the_same_numbers(tree):
    own = leaves(tree)
    parts = [_as_tensor(leaf) for leaf in own]
    nothing = torch.empty(0, dtype=torch.uint8)
    flat = torch.cat([nothing, *(_to_bytes(part, torch.device("cpu")) for part in parts)])
    counts = [len(part) if part.ndim else 1 for part in parts]
    assert repr(list(_from_bytes(own, counts, flat))) == repr(own)


@given(trees)
def test_packing_and_unpacking_give_every_number_back(tree):
    own = leaves(tree)
    packed = _pack(own, 1.0, torch.device("cpu"))
    pairs = _unpack(own, packed, lambda leaf, part: (leaf, part))
    for leaf, (same, part) in zip(own, pairs, strict=True):
        assert same is leaf
        expected = torch.as_tensor(leaf, dtype=torch.float64)
        assert torch.equal(torch.as_tensor(part, dtype=torch.float64), expected)


# --- where a group is missing ---


@pytest.mark.parametrize("call", [all_reduce_mean, all_reduce_sum, all_gather])
def test_without_init_under_a_launcher_it_says_so(monkeypatch, call):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=rf"`{call.__name__}` needs the process group"):
        call(1.0)


def _raises_nothing_here():
    rank, size = rank_and_size()
    return all_reduce_mean({"a": [1.0, rank]}, weight=size)


def test_the_result_is_the_same_on_every_rank():
    results = run_caught(_raises_nothing_here, world_size=4)
    assert results == [{"a": [1.0, 1.5]}] * 4
