"""Sums in fixed point: the same bits in any order and grouping, near the true sum, no wrap."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pardata import _fixed_point
from pardata._fixed_point import LARGEST, MOST, add, largest, value, zeros

CPU = torch.device("cpu")
FLOATING = [torch.bfloat16, torch.float16, torch.float32, torch.float64]

numbers = st.floats(-LARGEST, LARGEST, allow_nan=False)
# A list of numbers, each with a weight; the weights add up to one, as those of microbatches.
weighted = st.lists(st.tuples(numbers, st.integers(1, 1000)), min_size=1, max_size=30).map(
    lambda pairs: [(number, count / sum(c for _, c in pairs)) for number, count in pairs]
)


def words_of(pairs):
    words = zeros(1, CPU)
    for number, weight in pairs:
        add(words, torch.tensor([number], dtype=torch.float64), weight)
    return words


def exact(words):
    high, low = words[:, 0].tolist()
    return Fraction(high, 2**20) + Fraction(low, 2**68)


# The same in any order and grouping


@given(weighted, st.randoms(use_true_random=False), st.integers(1, 5))
def test_any_order_and_grouping_gives_the_same_words(pairs, random, groups):
    expected = words_of(pairs)
    shuffled = random.sample(pairs, len(pairs))
    total = zeros(1, CPU)
    for start in range(groups):
        total += words_of(shuffled[start::groups])
    assert torch.equal(total, expected)


def test_floating_point_itself_is_not_so():
    # What all this is for.
    assert (1e16 + 1.0) - 1e16 != 1.0 + (1e16 - 1e16)
    pairs = [(2.0**40, 0.3), (2.0**-25, 0.3), (-(2.0**40), 0.3)]
    assert value(words_of(pairs)) == value(words_of(pairs[::-1])) > 0


@given(st.lists(numbers, min_size=1, max_size=40), st.integers(1, 7))
def test_where_a_tensor_is_cut_makes_no_difference(many, block):
    whole, cut = zeros(len(many), CPU), zeros(len(many), CPU)
    tensor = torch.tensor(many, dtype=torch.float64)
    add(whole, tensor, 1 / 3)
    for start in range(0, len(many), block):
        add(cut[:, start : start + block], tensor[start : start + block], 1 / 3)
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("extra", [-1, 0, 1, 3])
def test_numbers_beyond_one_block_are_added_alike(extra):
    count = 2 * _fixed_point._BLOCK + extra
    many = torch.randn(count, generator=torch.Generator().manual_seed(0))
    words = zeros(count, CPU)
    add(words, many, 0.7)
    assert torch.equal(value(words), many.double() * 0.7)


# How near the sum is


@given(weighted)
def test_each_number_is_off_by_at_most_half_a_step_of_the_lower_word(pairs):
    # Against the rational sum of what was rounded once, in float64.
    true = sum(Fraction(number * weight) for number, weight in pairs)
    assert abs(exact(words_of(pairs)) - true) <= len(pairs) * Fraction(1, 2**69)


@given(weighted)
def test_the_value_is_the_sum_as_float64_has_it(pairs):
    words = words_of(pairs)
    true = exact(words)
    error = abs(Fraction(value(words).item()) - true)
    assert error <= abs(true) * Fraction(1, 2**51) + len(pairs) * Fraction(1, 2**74)


def test_gradients_of_1e_9_in_eight_microbatches_keep_ten_digits_as_fsum_has_them():
    many = 1e-9 * (1 + torch.rand(1000, 8, generator=torch.Generator().manual_seed(0)).double())
    words = zeros(1000, CPU)
    for microbatch in many.t():
        add(words, microbatch, 1 / 8)
    for ours, gradients in zip(value(words).tolist(), many.tolist(), strict=True):
        assert ours == pytest.approx(math.fsum(gradients) / 8, rel=2e-11, abs=0)


def test_what_cancels_leaves_nothing():
    words = zeros(3, CPU)
    for sign in (1, -1):
        add(words, sign * torch.tensor([LARGEST, math.pi, 1e-15]), 0.5)
    assert words.count_nonzero() == 0


# The limits


def test_nothing_of_the_largest_magnitude_wraps_if_the_weights_sum_to_one():
    for count in (1, 2, 3, 7, 1000):
        for sign in (1.0, -1.0):
            words = words_of([(sign * LARGEST, 1 / count)] * count)
            assert value(words).item() == pytest.approx(sign * LARGEST, rel=1e-12)
            assert (words[0] * sign > 0).all()


def test_just_beyond_twice_the_largest_would_wrap():
    # So the limit is no larger than it needs to be.
    assert LARGEST * 2**20 * 2 == 2**63


@given(st.floats(-(2.0**-20), 2.0**-20))
def test_the_most_numbers_of_a_sum_do_not_wrap_the_lower_word(number):
    words = words_of([(number, 1.0)])
    assert abs(words[1].item()) * MOST < 2**63


def test_the_lower_word_is_at_most_half_a_step_of_the_upper():
    words = words_of([(2.0**-21, 1.0)])  # halfway
    assert words[:, 0].tolist() in ([0, 2**47], [1, -(2**47)])


# Kinds of tensors


@pytest.mark.parametrize("dtype", FLOATING)
def test_every_dtype_is_added_as_it_is(dtype):
    tensor = torch.tensor([1.5, -0.25, 2.0**-14, 0.0, -0.0, 240.0], dtype=dtype)
    words = zeros(6, CPU)
    add(words, tensor, 1.0)
    assert torch.equal(value(words), tensor.double())


@pytest.mark.parametrize("dtype", FLOATING)
def test_what_is_added_is_left_as_it_was(dtype):
    tensor = torch.tensor([1.5, -0.25, 3e-5], dtype=dtype)
    before = tensor.clone()
    add(zeros(3, CPU), tensor, 0.3)
    assert torch.equal(tensor, before)


def test_parts_of_complex_numbers_are_added():
    tensor = torch.tensor([1 + 2j, -3.5j], dtype=torch.complex64)
    words = zeros(4, CPU)
    add(words, torch.view_as_real(tensor), 0.5)
    assert value(words).tolist() == [0.5, 1.0, 0.0, -1.75]


LAYOUTS = {
    "transposed": lambda t: t.t(),
    "every other": lambda t: t[:, ::2],
    "expanded": lambda t: t[:, :1].expand(-1, 5),
    "no dimensions": lambda t: t[0, 0],
    "channels last": lambda t: t.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_taken_in_the_order_of_their_indices(layout):
    tensor = LAYOUTS[layout](torch.arange(24.0).view(6, 4))
    words = zeros(tensor.numel(), CPU)
    add(words, tensor, 1.0)
    assert torch.equal(value(words).view(tensor.shape), tensor.double())


def test_of_nothing_there_is_nothing():
    words = zeros(0, CPU)
    add(words, torch.empty(0, 3), 1.0)
    assert value(words).shape == (0,)
    assert words.shape == (2, 0)
    assert largest(torch.empty(0, 3)) == 0


def test_a_tensor_with_a_history_gets_no_more_of_it():
    tensor = torch.ones(2, requires_grad=True) * 2
    words = zeros(2, CPU)
    add(words, tensor, 1.0)
    assert not value(words).requires_grad
    assert not largest(tensor).requires_grad
    assert tensor._version == 0


# The largest


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("count", [1, 5, 1000])
@pytest.mark.parametrize("place", [0, -1])
def test_the_largest_magnitude_is_found_wherever_it_is(dtype, count, place):
    tensor = torch.full((count,), 0.5, dtype=dtype)
    tensor[place] = -3.0
    assert largest(tensor) == 3.0
    assert largest(tensor).dtype == torch.float64
    assert largest(tensor).shape == ()


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("count", [1, 5, 1000])
@pytest.mark.parametrize("place", [0, -1])
def test_nan_and_infinity_are_the_largest_of_all(dtype, count, place):
    tensor = torch.ones(count, dtype=dtype)
    tensor[place] = -math.inf
    assert largest(tensor) == math.inf
    tensor[place // 2] = math.nan
    assert largest(tensor).isnan()


# --- the fast way to round ---


@given(
    st.lists(st.floats(-(2.0**33), 2.0**33, allow_subnormal=True), min_size=1, max_size=20),
    st.floats(2.0**-10, 1),
    st.integers(-60, 0),
)
def test_the_fast_way_to_round_gives_the_words_of_the_plain_one(numbers, weight, exponent):
    values = torch.tensor(numbers, dtype=torch.float64) * 2.0**exponent
    fast, plain = _fixed_point.zeros(len(values), CPU), _fixed_point.zeros(len(values), CPU)
    _fixed_point.add(fast, values, weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fixed_point, "_fit_beside_the_shift", lambda _numbers: False)
        _fixed_point.add(plain, values, weight)
    assert torch.equal(fast, plain)


@pytest.mark.parametrize("number", [0.5, 1.5, 2.5, -0.5, -1.5, 2.0**30 + 0.5])
def test_halves_are_rounded_to_even_either_way(number):
    word = torch.zeros(1, dtype=torch.int64)
    rounded = _fixed_point._add_rounded(word, torch.tensor([number], dtype=torch.float64))
    assert rounded.item() == word.item() == round(number)


@pytest.mark.parametrize(
    ("number", "fits"), [(2.0**50, True), (2.0**51, False), (torch.nan, False)]
)
def test_only_numbers_that_fit_beside_the_shift_take_the_fast_way(number, fits):
    numbers = torch.tensor([1.0, number, -number], dtype=torch.float64)
    assert _fixed_point._fit_beside_the_shift(numbers) == fits
