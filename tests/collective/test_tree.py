"""Structures taken apart, described and put together again."""

import re
from collections import OrderedDict

import numpy as np
import pytest
import torch
from collective_zoo import Metrics, leaves, rebuild
from hypothesis import given
from hypothesis import strategies as st

from pardata.collective._header import numbers_of
from pardata.collective._tree import in_brackets

numbers = st.integers(-100, 100) | st.booleans() | st.floats(allow_nan=False)
structures = st.recursive(
    numbers,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.builds(Metrics, inner, inner)
    ),
    max_leaves=12,
)


@given(structures)
def test_what_is_taken_apart_can_be_put_together(value):
    back = rebuild(value, iter(leaves(value)))
    assert back == value
    assert repr(back) == repr(value)  # order of keys, types and True against 1 too


@given(structures)
def test_every_leaf_has_a_path_of_its_own(value):
    paths = [in_brackets("value", path) for path in numbers_of(value)]
    assert len(set(paths)) == len(paths)


def test_each_leaf_comes_with_its_path():
    value = {"loss": [1.0, (2.0,)], 3: Metrics(4, 5)}
    found = [(in_brackets("value", p), leaf) for p, leaf in numbers_of(value).items()]
    assert found == [
        ("value['loss'][0]", 1.0),
        ("value['loss'][1][0]", 2.0),
        ("value[3][0]", 4),
        ("value[3][1]", 5),
    ]


def test_the_order_of_keys_does_not_matter_to_the_leaves_and_is_kept_in_the_result():
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert leaves(one) == leaves(other) == [1, 2]
    assert list(rebuild(other, iter([10, 20])).items()) == [("b", 20), ("a", 10)]


def test_an_ordered_dict_keeps_its_type_and_a_shape_becomes_a_tuple():
    assert type(rebuild(OrderedDict(a=1), iter([2]))) is OrderedDict
    assert type(rebuild(torch.Size([1, 2]), iter([3, 4]))) is tuple


@pytest.mark.parametrize(
    ("scalar", "kind"),
    [
        (np.float32(0.5), float),
        (np.float64(0.5), float),
        (np.int64(3), int),
        (np.bool_(1), bool),
        (np.array(0.5), float),
    ],
)
def test_numpy_scalars_are_numbers(scalar, kind):
    (leaf,) = leaves(scalar)
    assert type(leaf) is kind
    assert leaf == scalar


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("high", "`value` must be a number or a tensor, but is 'high' (str)"),
        ({"a": [1, None]}, "`value['a'][1]` must be a number or a tensor, but is None (NoneType)"),
        ((1, 2j), "`value[1]` must be a number or a tensor, but is 2j (complex)"),
        ({1, 2}, "`value` must be a number or a tensor, but is {1, 2} (set)"),
        ([np.ones(1)], "`value[0]` must be a number or a tensor, but is array([1.]) (ndarray)"),
        ([np.str_("x")], "`value[0]` must be a number or a tensor, but is 'x' (str)"),
        (
            {"c": torch.ones(1, dtype=torch.complex64)},
            "`value['c']` must be a dense tensor of real numbers, but is complex: convert it first",
        ),
        (
            [torch.eye(2).to_sparse()],
            "`value[0]` must be a dense tensor of real numbers, but is a torch.sparse_coo Tensor",
        ),
    ],
)
def test_what_is_no_number_is_named_by_its_path(value, text):
    with pytest.raises(TypeError, match=f"^{re.escape(text)}"):
        leaves(value)
