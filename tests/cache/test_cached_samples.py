"""A sample taken apart and put together: every kind of part and container, as DataLoader has it."""

import re
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import default_collate

from pardata.cache._cache_files import Field
from pardata.cache._sample import (
    as_tensor,
    fields_of,
    kinds_of,
    leaves,
    of_kind,
    parts_of,
    rebuilt,
    store,
)

Plain = namedtuple("Plain", ["x", "y"])  # noqa: PYI024  # the untyped kind must work too


class Typed(NamedTuple):
    box: object
    label: object


class Colour(IntEnum):
    RED = 3


def equal(one, other):
    """Whether two samples or batches are the same, in the types of their containers too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def stored(samples):
    """Return the samples, and the batch of all, after they were stored."""
    parts = [parts_of(sample) for sample in samples]
    fields = fields_of(parts[0])
    into = [torch.empty(len(samples), *f.shape, dtype=f.torch_dtype) for f in fields]
    for row, each in enumerate(parts):
        store(each, into, row, fields)
    first, kinds = samples[0], kinds_of(samples[0])
    back = [
        rebuilt(first, (of_kind(k, rows[i].clone()) for k, rows in zip(kinds, into, strict=True)))
        for i in range(len(samples))
    ]
    return back, rebuilt(first, iter(into), collated=True)


# --- kinds of parts ---

PARTS = {
    "int": lambda i: i,
    "negative": lambda i: -i,
    "bool": lambda i: i % 2 == 0,
    "float": lambda i: i / 3,
    "nan and infinity": lambda i: [float("inf"), -0.0, 1e300][i],
    "int64": lambda i: 2**62 + i,
    "numpy float32": lambda i: np.float32(i / 3),
    "numpy float64": lambda i: np.float64(i / 3),
    "numpy int8": np.int8,
    "numpy bool": lambda i: np.bool_(i == 1),
    "numpy complex": lambda i: np.complex64(i + 1j),
    "numpy uint16": np.uint16,
    "array": lambda i: np.arange(6, dtype=np.float32).reshape(2, 3) + i,
    "bool array": lambda i: np.arange(3) == i,
    "array of a number": np.array,
    "empty array": lambda i: np.zeros((0, 3), dtype=np.int16),
    "tensor of a number": torch.tensor,
    "empty tensor": lambda i: torch.zeros(2, 0),
    "transposed tensor": lambda i: torch.arange(6).view(2, 3).t() + i,
    "expanded tensor": lambda i: torch.tensor([i]).expand(3),
    **{
        f"{dtype} tensor": lambda i, dtype=dtype: torch.tensor([i, 1, 0]).to(getattr(torch, dtype))
        for dtype in (
            *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
            *("float16", "bfloat16", "float32", "float64", "float8_e5m2"),
            *("complex64", "complex128"),
        )
    },
}


def as_bytes(sample):
    """For dtypes of which PyTorch compares nothing."""
    return sample.view(torch.uint8) if sample.dtype.itemsize == 1 else sample


# torch 2.6's own default_collate, of NumPy's bools
@pytest.mark.filterwarnings("ignore:In future, it will be an error for 'np.bool'")
@pytest.mark.parametrize("name", PARTS)
def test_a_part_comes_back_as_it_was_and_its_batch_as_the_data_loader_has_it(name):
    samples = [PARTS[name](i) for i in range(3)]
    back, batch = stored(samples)
    collated = default_collate(samples)
    if "float8" in name:
        back, samples, batch, collated = (
            *([as_bytes(each) for each in many] for many in (back, samples)),
            *(as_bytes(many) for many in (batch, collated)),
        )
    assert equal(back, samples)
    assert equal(batch, collated)


def test_a_numpy_number_that_the_data_loader_refuses_has_a_batch_too():
    samples = [np.uint64(2**63 + i) for i in range(3)]
    back, batch = stored(samples)
    assert equal(back, samples)
    assert equal(batch.numpy(), np.array(samples))


def test_arrays_that_pytorch_refuses_or_warns_of_are_stored():
    frozen = np.arange(3)
    frozen.flags.writeable = False
    for array in (np.arange(3)[::-1], np.arange(3, dtype=">i4"), frozen, np.arange(6)[::2]):
        (back,), batch = stored([array])
        assert np.array_equal(back, array)
        assert batch[0].tolist() == array.tolist()


def test_a_number_of_a_class_of_its_own_is_stored_as_the_number():
    (back,), batch = stored([Colour.RED])
    assert type(back) is int
    assert back == 3
    assert batch.dtype == torch.int64


def test_a_tensor_with_a_gradient_is_stored_without():
    (back,), batch = stored([torch.ones(2, requires_grad=True) * 2])
    assert not back.requires_grad
    assert batch.tolist() == [[2, 2]]


@pytest.mark.parametrize("lazy", ["conj", "negative"])
def test_a_tensor_that_is_not_yet_computed_is(lazy):
    tensor = torch.tensor([1 + 2j]).conj()
    (back,), _ = stored([tensor if lazy == "conj" else tensor.imag])
    assert back.tolist() == ([1 - 2j] if lazy == "conj" else [-2])


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "CMYK", "YCbCr"])
def test_an_image_becomes_bytes_of_bands_height_and_width(mode):
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = np.arange(3 * 2 * bands, dtype=np.uint8).reshape(3, 2, bands)
    image = Image.frombytes(mode, (2, 3), values.tobytes())
    tensor = as_tensor(image, "sample")
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (bands, 3, 2)
    assert np.array_equal(tensor.permute(1, 2, 0).numpy(), values)
    (back,), batch = stored([image])
    assert torch.equal(back, tensor)
    assert torch.equal(batch[0], tensor)


def test_an_image_is_what_torchvision_makes_of_it():
    to_tensor = pytest.importorskip("torchvision.transforms.functional").pil_to_tensor
    for mode in ("L", "RGB", "RGBA"):
        size = 5 * 4 * len(Image.new(mode, (1, 1)).getbands())
        image = Image.frombytes(mode, (5, 4), bytes(range(size)))
        assert torch.equal(as_tensor(image, "sample"), to_tensor(image))


def test_an_image_from_a_file_is_read(tmp_path):
    image = Image.frombytes("RGB", (2, 2), bytes(range(12)))
    image.save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as opened:
        assert torch.equal(as_tensor(opened, "sample"), as_tensor(image, "sample"))


REFUSED = {
    "a str": ("text", "a str"),
    "bytes": (b"text", "a bytes"),
    "none": (None, "a NoneType"),
    "a set": ({1}, "a set"),
    "a fraction": (Fraction(1, 2), "a Fraction"),
    "a decimal": (Decimal(1), "a Decimal"),
    "complex": (1j, "a complex"),
    "a large int": (2**63, "a int (Overflow"),
    "a sparse tensor": (torch.eye(2).to_sparse(), "a Tensor that is sparse, quantized or nested"),
    "an array of text": (np.array(["a"]), "a ndarray (can't convert np.ndarray of type numpy.str_"),
    "an array of objects": (np.array([None]), "a ndarray (can't convert"),
    "a structured array": (np.zeros(1, dtype=[("a", "i4")]), "a ndarray (can't convert"),
    "text of numpy": (np.str_("a"), "a str_ (can't convert"),
    "a date": (np.datetime64("2020-01-01"), "a datetime64 (can't convert"),
    "an object": (object(), "a object"),
    "a function": (print, "a builtin_function_or_method"),
    **{
        f"an image of mode {mode}": (Image.new(mode, (2, 2)), f"a Image of mode {mode}")
        for mode in ("1", "P", "I", "F", "I;16", "HSV", "LAB")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_part_is_refused_by_its_path_with_the_cure(name):
    leaf, what = REFUSED[name]
    with pytest.raises(TypeError) as raised:
        parts_of({"image": 1, "rest": (0, leaf)})
    text = str(raised.value)
    assert text.startswith(
        "`sample['rest'][1]` must be a dense tensor, an array, an image of 8 bits a band or a "
        f"number, but is {what}"
    )
    assert text.endswith(": convert it in the data set, or leave it out")


def test_a_nested_tensor_is_refused():
    with pytest.warns(UserWarning, match="nested"):
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(TypeError, match="that is sparse, quantized or nested"):
        as_tensor(nested, "sample")


@pytest.mark.parametrize("sample", [{}, (), [], {"a": []}, [(), {}]])
def test_a_sample_without_parts_is_refused(sample):
    text = f"`sample` must have at least one part, but is {sample!r}"
    with pytest.raises(TypeError, match=re.escape(text)):
        parts_of(sample)


# --- containers ---


class OwnList(list):
    pass


CONTAINERS = {
    "bare": lambda i: torch.tensor([i]),
    "tuple": lambda i: (torch.tensor([i]), i),
    "list": lambda i: [torch.tensor([i]), i],
    "one": lambda i: (i,),
    "dict": lambda i: {"x": torch.tensor([i]), 7: i, (1, 2): i / 2},
    "nested": lambda i: {"a": [(i, {"b": torch.tensor(i)}), []], "c": ()},
    "namedtuple": lambda i: Plain(torch.tensor(i), [i, i]),
    "typed namedtuple": lambda i: Typed(box=(i, i), label={"n": i}),
    "OrderedDict": lambda i: OrderedDict(b=i, a=torch.tensor(i)),
    "defaultdict": lambda i: defaultdict(list, a=i, b=(i,)),
    "torch.Size": lambda i: torch.Size([i, 2]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_comes_back_as_it_was_and_its_batch_as_the_data_loader_has_it(name):
    samples = [CONTAINERS[name](i) for i in range(3)]
    back, batch = stored(samples)
    assert equal(back, samples)
    assert equal(batch, default_collate(samples))


def test_the_first_sample_is_not_changed_by_what_is_made_like_it():
    sample = defaultdict(list, a=torch.zeros(2))
    made = rebuilt(sample, iter([torch.ones(2)]))
    assert made.default_factory is list
    assert made["a"].tolist() == [1, 1]
    assert sample["a"].tolist() == [0, 0]


def test_mappings_and_lists_of_other_classes_are_read():
    for sample in (UserDict(a=1, b=torch.tensor(2)), MappingProxyType({"a": 1, "b": 2})):
        (back,), batch = stored([sample])
        assert dict(back) == dict(sample)
        assert {key: value.tolist() for key, value in batch.items()} == {"a": [1], "b": [2]}
    (back,), _ = stored([OwnList([1, 2])])
    assert type(back) is OwnList
    assert back == [1, 2]


numbers = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans()
).map(lambda value: lambda i: value)
tensors = st.lists(st.integers(0, 3), max_size=3).map(
    lambda shape: lambda i: torch.full(shape, i, dtype=torch.int32)
)
arrays = st.integers(0, 3).map(lambda size: lambda i: np.full(size, i, dtype=np.float32))
structures = st.recursive(
    numbers | tensors | arrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda fs: lambda i: [f(i) for f in fs]),
        st.lists(inner, max_size=3).map(lambda fs: lambda i: tuple(f(i) for f in fs)),
        st.tuples(inner, inner).map(lambda fs: lambda i: Plain(*(f(i) for f in fs))),
        st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3).map(
            lambda fs: lambda i: {key: f(i) for key, f in fs.items()}
        ),
    ),
    max_leaves=8,
)


@given(structures)
def test_any_nesting_comes_back_and_has_the_batch_of_the_data_loader(structure):
    samples = [structure(i) for i in range(3)]
    if not list(leaves(samples[0])):
        return
    back, batch = stored(samples)
    assert equal(back, samples)
    assert equal(batch, default_collate(samples))


# --- paths, fields, samples that differ ---


def test_parts_are_named_as_they_are_reached():
    sample = {"image": 1, "boxes": [(2, 3)], 0: Plain({"a": 4}, 5)}
    assert dict(leaves(sample)) == {
        "sample['image']": 1,
        "sample['boxes'][0][0]": 2,
        "sample['boxes'][0][1]": 3,
        "sample[0][0]['a']": 4,
        "sample[0][1]": 5,
    }
    assert list(leaves(7)) == [("sample", 7)]


def test_fields_say_the_dtype_and_shape_of_each_part():
    image = Image.new("RGB", (4, 2))
    assert fields_of(parts_of((image, 1, 2.0, True, np.zeros((2, 0), np.float16)))) == [
        Field("sample[0]", "uint8", (3, 2, 4)),
        Field("sample[1]", "int64", ()),
        Field("sample[2]", "float64", ()),
        Field("sample[3]", "bool", ()),
        Field("sample[4]", "float16", (2, 0)),
    ]


FIRST = {"x": torch.zeros(2, 3), "y": 1}


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (
            {"x": torch.zeros(3, 2), "y": 1},
            (
                "`sample['x']` must be float32 of shape (2, 3), as in the first sample, but is "
                "float32 of shape (3, 2): resize, crop or convert it in the data set's transform"
            ),
        ),
        ({"x": torch.zeros(3), "y": 1}, "but is float32 of shape (3,): resize"),
        ({"x": torch.zeros(1, 1), "y": 1}, "but is float32 of shape (1, 1): resize"),
        ({"x": torch.zeros(()), "y": 1}, "but is float32 of shape (): resize"),
        ({"x": torch.zeros(2, 3).double(), "y": 1}, "but is float64 of shape (2, 3): resize"),
        ({"x": torch.zeros(2, 3), "y": 1.0}, "`sample['y']` must be int64 of shape (), as in the"),
        ({"x": torch.zeros(2, 3), "y": True}, "but is bool of shape ()"),
        (
            {"x": torch.zeros(2, 3)},
            (
                "it must have the same parts as the first sample, but lacks `sample['y']`: return "
                "the same parts for every sample"
            ),
        ),
        (
            {"x": torch.zeros(2, 3), "z": 1, "y": 1},
            "as the first sample, but has `sample['z']` besides: return",
        ),
        ((torch.zeros(2, 3), 1), "but lacks `sample['x']`, lacks `sample['y']`, has `sample[0]`"),
        (torch.zeros(2, 3), "lacks `sample['y']`, has `sample` besides"),
        ({"x": [torch.zeros(2, 3)], "y": 1}, "lacks `sample['x']`, has `sample['x'][0]` besides"),
    ],
)
def test_a_sample_unlike_the_first_is_refused(sample, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        stored([FIRST, sample])


def test_keys_may_come_in_any_order():
    other = {"y": 2, "x": torch.ones(2, 3)}
    back, batch = stored([FIRST, other])
    assert equal(back[1], {"x": torch.ones(2, 3), "y": 2})
    assert equal(batch, default_collate([FIRST, other]))
