"""Samples in a cache: every kind of part and container comes back, and batches as DataLoader's."""

import re
import tempfile
from collections import UserDict, defaultdict
from enum import IntEnum
from types import MappingProxyType

import numpy as np
import pytest
import torch
from alike import equal
from common_cache import Point
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import default_collate

from pardata import cache_dataset, make_loader


class Color(IntEnum):
    RED = 3


class OwnList(list):
    pass


def stored(samples):
    """Return the samples, and the batch of all, as they come out of a cache."""
    with tempfile.TemporaryDirectory() as directory:
        cached = cache_dataset(samples, directory, num_workers=0)
        (batch,) = make_loader(cached, len(samples), device=None)
        return [cached[index] for index in range(len(samples))], batch


KINDS = {
    "infinity and minus zero": lambda i: [float("inf"), -0.0, 1e300][i],
    "numpy float32": lambda i: np.float32(i / 3),
    "numpy complex": lambda i: np.complex64(i + 1j),
    "numpy uint16": np.uint16,
    "array": lambda i: np.arange(6, dtype=np.float32).reshape(2, 3) + i,
    "empty array": lambda i: np.zeros((0, 3), dtype=np.int16),
    "empty tensor": lambda i: torch.zeros(2, 0),
    "transposed tensor": lambda i: torch.arange(6).view(2, 3).t() + i,
    "expanded tensor": lambda i: torch.tensor([i]).expand(3),
    **{
        f"{dtype} tensor": lambda i, dtype=dtype: torch.tensor([i, 1, 0]).to(getattr(torch, dtype))
        for dtype in (
            *("bool", "uint8", "int8", "int16", "int32", "uint16", "uint32", "uint64"),
            *("float16", "bfloat16", "float32", "float64", "float8_e5m2", "complex128"),
        )
    },
    # containers: the others are in any nesting, below
    "empty ones": lambda i: {(1, 2): [(i, {"b": torch.tensor(i)}), []], "c": ()},
    "defaultdict": lambda i: defaultdict(list, a=i, b=(i,)),
    "lists of numbers": lambda i: [[i, 2], [i / 3], [i > 1, True, False], [i, 0.5], []],
}


@pytest.mark.parametrize("name", KINDS)
def test_samples_and_their_batch_come_back_unchanged(name):
    samples = [KINDS[name](i) for i in range(3)]
    back, batch = stored(samples)
    assert equal(back, samples)
    assert equal(batch, default_collate(samples))


def test_what_comes_back_in_another_form_is_the_same_all_the_same():
    frozen = np.arange(3)
    frozen.flags.writeable = False
    for array in (np.arange(3)[::-1], np.arange(3, dtype=">i4"), frozen, np.arange(6)[::2]):
        (back,), batch = stored([array])
        assert back.tolist() == batch[0].tolist() == array.tolist()
    samples = [np.uint64(2**63 + i) for i in range(3)]  # which the DataLoader refuses
    back, batch = stored(samples)
    assert equal(back, samples)
    assert equal(batch.numpy(), np.array(samples))
    ((number, tensor, conjugate),), batch = stored(
        [(Color.RED, torch.ones(2, requires_grad=True) * 2, torch.tensor([1 + 2j]).conj())]
    )
    assert (type(number), number, batch[0].dtype) == (int, 3, torch.int64)
    assert (tensor.requires_grad, tensor.tolist()) == (False, [2, 2])
    assert conjugate.tolist() == [1 - 2j]


def test_mappings_and_lists_of_other_classes_are_read():
    for sample in (UserDict(a=1, b=torch.tensor(2)), MappingProxyType({"a": 1, "b": 2})):
        (back,), batch = stored([sample])
        assert dict(back) == dict(sample)
        assert {key: value.tolist() for key, value in batch.items()} == {"a": [1], "b": [2]}
    for sample in (OwnList([1, 2]), torch.Size([1, 2])):
        (back,), batch = stored([sample])
        assert list(back) == [1, 2]
        assert [column.tolist() for column in batch] == [[1], [2]]


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_an_image_becomes_bytes_of_bands_height_and_width(mode):
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = np.arange(3 * 2 * bands, dtype=np.uint8).reshape(3, 2, bands)
    image = Image.frombytes(mode, (2, 3), values.tobytes())
    ((back,), _) = stored([image])
    assert (back.dtype, back.shape) == (torch.uint8, (bands, 3, 2))
    assert np.array_equal(back.permute(1, 2, 0).numpy(), values)


REFUSED = {
    "a large int": (lambda: 2**63, "an int (Overflow"),
    "a sparse tensor": (lambda: torch.eye(2).to_sparse(), "a Tensor that is sparse, quan"),
    "an array of objects": (lambda: np.array([None]), "a ndarray (can't convert"),
    "an image": (lambda: Image.new("P", (2, 2)), "an Image of mode P"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_part_is_refused_by_its_path_with_the_cure(name, tmp_path):
    make, what = REFUSED[name]
    with pytest.raises(RuntimeError) as raised:
        cache_dataset([{"image": 1, "rest": (0, make())}], tmp_path)
    text = str(raised.value)
    must = (
        "a dense tensor, an array, an image of 8 bits a band, bytes, a number or a list of numbers"
    )
    assert text.startswith(
        f"sample 0 cannot be cached: TypeError: `sample['rest'][1]` must be {must} of one type, "
        f"but is {what}"
    )
    assert text.endswith(": convert it in the dataset, or leave it out")


@pytest.mark.parametrize("sample", [{}, (), {"a": ()}])
def test_a_sample_without_parts_is_refused(sample, tmp_path):
    with pytest.raises(RuntimeError, match=re.escape(f"at least one part, but is {sample!r}")):
        cache_dataset([sample], tmp_path)


numbers = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans()
).map(lambda value: lambda i: value)
tensors = st.lists(st.integers(0, 3), max_size=3).map(
    lambda shape: lambda i: torch.full(shape, i, dtype=torch.int32)
)
structures = st.recursive(
    numbers | tensors,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda fs: lambda i: [f(i) for f in fs]),
        st.tuples(inner, inner).map(lambda fs: lambda i: Point(*(f(i) for f in fs))),
        st.dictionaries(st.text(max_size=3) | st.integers(), inner, min_size=1, max_size=3).map(
            lambda fs: lambda i: {key: f(i) for key, f in fs.items()}
        ),
    ),
    max_leaves=8,
)


@settings(max_examples=40)
@given(structures)
def test_any_nesting_comes_back_and_has_the_batch_of_the_data_loader(structure):
    samples = [structure(i) for i in range(3)]
    back, batch = stored(samples)
    assert equal(back, samples)
    assert equal(batch, default_collate(samples))


USUAL = {"x": torch.zeros(2, 3), "y": 1}
FIRST = "as in the first sample, but is"
UNLIKE = [
    ({**USUAL, "y": True}, "but is 0-dimensional bool: make"),
    ({"x": torch.zeros(2, 3)}, f"`sample['y']` must be 0-dimensional int64, {FIRST} missing: make"),
    (
        {"x": torch.zeros(2, 3), "z": 1, "y": 1},
        f"`sample['z']` must be missing, {FIRST} 0-dimensional int64: make",
    ),
]


@pytest.mark.parametrize(("sample", "text"), UNLIKE)
def test_a_sample_unlike_the_first_is_refused(sample, text, tmp_path):
    with pytest.raises(ValueError, match=re.escape(text)):
        cache_dataset([USUAL, sample], tmp_path, num_workers=0)
