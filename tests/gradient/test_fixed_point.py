"""Sums in fixed point: the same bits in any order and grouping, near the true sum, no wrap."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pardata.gradient import _fixed_point
from pardata.gradient._exact_sums import Bucket
from pardata.gradient._fixed_point import LARGEST, MOST, SMALL, add, largest, value

FLOATING = [torch.bfloat16, torch.float16, torch.float32, torch.float64]

numbers = st.floats(-LARGEST, LARGEST, allow_nan=False)
# A list of numbers, each with a weight; the weights add up to one, as those of microbatches.
weighted = st.lists(st.tuples(numbers, st.integers(1, 1000)), min_size=1, max_size=30).map(
    lambda pairs: [(number, count / sum(c for _, c in pairs)) for number, count in pairs]
)


def two_words(count):
    """Return low and high words, of nothing."""
    return torch.zeros(2, count, dtype=torch.int64)


def words_of(pairs):
    words = two_words(1)
    for number, weight in pairs:
        add(torch.tensor([number], dtype=torch.float64), weight, *words)
    return words


def exact(words):
    low, high = words[:, 0].tolist()
    return Fraction(high, 2**16) + Fraction(low, 2**62)


# The same in any order and grouping


@given(weighted, st.randoms(use_true_random=False), st.integers(1, 5))
def test_any_order_and_grouping_gives_the_same_words(pairs, random, groups):
    expected = words_of(pairs)
    shuffled = random.sample(pairs, len(pairs))
    total = two_words(1)
    for start in range(groups):
        total += words_of(shuffled[start::groups])
    assert torch.equal(total, expected)


@given(st.lists(numbers, min_size=1, max_size=40), st.integers(1, 7))
def test_where_a_tensor_is_cut_makes_no_difference(many, block):
    whole, cut = two_words(len(many)), two_words(len(many))
    tensor = torch.tensor(many, dtype=torch.float64)
    add(tensor, 1 / 3, *whole)
    for start in range(0, len(many), block):
        add(tensor[start : start + block], 1 / 3, *cut[:, start : start + block])
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("extra", [-1, 0, 1, 3])
def test_numbers_beyond_one_block_are_added_alike(extra):
    count = 2 * _fixed_point._BLOCK + extra
    many = torch.randn(count, generator=torch.Generator().manual_seed(0))
    words = two_words(count)
    add(many, 0.7, *words)
    torch.testing.assert_close(value(*words), many.double() * 0.7, rtol=1e-15, atol=2.0**-62)


class MostInBetween(TorchDispatchMode):
    """Notes how many numbers in float64 an operation makes at most."""

    most = 0

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float64:
            self.most = max(self.most, made.numel())
        return made


class OnGpu(torch.Tensor):
    """Says that it is on a GPU, where there is none."""

    is_cuda = True


@pytest.mark.parametrize(("kind", "most"), [(torch.Tensor, 2**16), (OnGpu, 2**24)])
def test_what_is_computed_in_between_takes_bounded_memory_on_a_gpu_too(kind, most):
    low, high = torch.zeros(2, 2**25 + 1, dtype=torch.int64, device="meta")  # takes none itself
    with MostInBetween() as seen:
        add(torch.ones(2**25 + 1, device="meta").as_subclass(kind), 0.5, low, high)
    assert seen.most == most


# How near the sum is


@given(weighted)
def test_each_number_is_off_by_at_most_half_a_step_of_the_low_word(pairs):
    # Against the rational sum of what was rounded once, in float64.
    true = sum(Fraction(number * weight) for number, weight in pairs)
    assert abs(exact(words_of(pairs)) - true) <= len(pairs) * Fraction(1, 2**63)


@given(weighted)
def test_the_value_is_the_sum_as_float64_has_it(pairs):
    words = words_of(pairs)
    true = exact(words)
    error = abs(Fraction(value(*words).item()) - true)
    assert error <= abs(true) * Fraction(1, 2**51) + len(pairs) * Fraction(1, 2**68)


# The limits


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nothing_wraps_if_the_weights_sum_to_one(count, sign):
    words = words_of([(sign * LARGEST, 1 / count)] * count)
    assert value(*words).item() == pytest.approx(sign * LARGEST, rel=1e-12)
    assert (words[1] * sign > 0).all()
    low = torch.zeros(1, dtype=torch.int64)  # alone, of small numbers
    for _ in range(count):
        add(torch.tensor([sign * SMALL]), 1 / count, low)
    assert value(low).item() == pytest.approx(sign, rel=1e-12)


@given(st.floats(-LARGEST, LARGEST))
def test_the_most_numbers_of_a_sum_do_not_wrap_the_low_word(number):
    # Beside what the small ones leave there, whose weights sum to one.
    words = words_of([(number, 1.0)])
    assert abs(words[0].item()) * MOST + SMALL * 2**62 < 2**63


def test_the_low_word_is_at_most_half_a_step_of_the_high_one():
    words = words_of([(2.0**-17, 1.0)])  # halfway
    assert words[:, 0].tolist() in ([2**45, 0], [-(2**45), 1])


# Where the high words are not needed


small = st.lists(st.floats(-SMALL, SMALL), min_size=1, max_size=30)


@given(small, st.integers(0, 40))
def test_of_small_numbers_the_low_word_alone_says_the_same(many, exponent):
    scaled = torch.tensor(many, dtype=torch.float64) * 2.0**-exponent
    both, low = two_words(len(many)), torch.zeros(len(many), dtype=torch.int64)
    for _ in range(3):
        add(scaled, 1 / 3, *both)
        add(scaled, 1 / 3, low)
    for place in range(len(many)):
        assert exact(both[:, place : place + 1]) == Fraction(low[place].item(), 2**62)
    assert torch.equal(value(low), value(*both))


@given(small, st.booleans())
def test_where_nobody_looks_the_words_are_the_same(many, is_large):
    # As on a GPU: high words are there, and `is_large` says whether they are for use.
    numbers = torch.tensor(many, dtype=torch.float64)
    blind, looked = two_words(len(many)), two_words(len(many))
    add(numbers, 0.7, *blind, torch.tensor(is_large))
    add(numbers, 0.7, *looked) if is_large else add(numbers, 0.7, looked[0])
    assert torch.equal(blind, looked)


def test_high_words_are_made_for_the_first_number_that_may_be_large():
    peak = torch.zeros((), dtype=torch.float64)
    places = {"b": slice(0, 1), "a": slice(1, 3), "c": slice(3, 4)}
    words = Bucket(places, torch.ones(4, dtype=torch.int64))
    words.add("a", torch.tensor([0.5, -0.25]), 0.5, peak)
    assert peak == 0.5
    assert "high" not in vars(words)
    words.add("a", torch.tensor([0.5, -0.75]), 0.5, peak)  # together it may be beyond one
    assert peak == 1.25
    assert "high" in vars(words)
    words.send()  # alone, so to nobody: what has had no gradient is 0 from here on
    assert value(words.low, words.high).tolist() == [0.0, 0.5, -0.5, 0.0]


# Kinds of tensors


@pytest.mark.parametrize("dtype", FLOATING)
def test_every_dtype_is_added_as_it_is_and_left_as_it_was(dtype):
    tensor = torch.tensor([1.5, -0.25, 2.0**-14, 0.0, -0.0, 240.0], dtype=dtype)
    before = tensor.clone()
    words = two_words(6)
    add(tensor, 1.0, *words)
    add(tensor, 0.3, *two_words(6))
    assert torch.equal(value(*words), tensor.double())
    assert torch.equal(tensor, before)


def test_both_parts_of_complex_numbers_are_added_and_come_back():
    tensor = torch.tensor([[1 + 2j, -3.5j]], dtype=torch.complex64)
    words = two_words(4)
    add(tensor, 0.5, *words)
    assert value(*words).tolist() == [0.5, 1.0, 0.0, -1.75]
    assert torch.equal(value(*words, torch.empty_like(tensor)), tensor / 2)
    assert torch.equal(value(*words, torch.empty(2, 1, dtype=torch.complex64).t()), tensor / 2)
    assert largest(tensor) == 3.5


# The largest


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("count", [1, 5, 1000])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("most", [-3.0, -math.inf, math.nan])
def test_the_largest_magnitude_is_found_wherever_it_is(dtype, count, place, most):
    tensor = torch.full((count,), 0.5, dtype=dtype)
    tensor[0] = -math.inf if math.isnan(most) else 0.5
    tensor[place] = most
    torch.testing.assert_close(largest(tensor), torch.tensor(abs(most)).double(), equal_nan=True)


# The value


@pytest.mark.parametrize("dtype", FLOATING)
def test_the_value_is_rounded_once_from_float64(dtype):
    words = words_of([(1 / 3, 0.5), (1e3, 0.5)])
    out = torch.empty(1, dtype=dtype)
    assert value(*words, out) is out
    assert torch.equal(out, value(*words).to(dtype))
