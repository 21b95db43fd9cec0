"""What has the same digest is the same to the last bit."""

import math
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from pardata._pytree import content_hash

Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024  # the untyped kind must work too
NAN = float("nan")
LAST = torch.tensor([99_999])


class NoEquality:
    """Compared by nothing but identity."""


@dataclass
class Item:
    """Compared by its parts, of which tensors of several elements cannot be."""

    x: object


class Quarrelsome:
    def __eq__(self, other):
        raise LookupError

    __hash__ = None


def image(pixels, mode="L", size=(2, 3)):
    pil = pytest.importorskip("PIL.Image")
    return pil.frombytes(mode, size, bytes(pixels))


SAME = {
    "tensors": lambda: torch.tensor([1.5, NAN, math.inf, -0.0]),
    "a view": lambda: torch.arange(6).reshape(2, 3).T,
    "an array of objects": lambda: np.array(["a" * 1000, (1, 2), torch.ones(2)], dtype=object),
    "an image": lambda: image(range(6)),
    "numbers": lambda: [1, 2.5, NAN, True, 2j],
    "a set of texts": lambda: frozenset({"order", "differs", "everywhere"}),
    "a dict": lambda: {"x": torch.tensor([NAN]), "y": [np.ones(2), {"z": "text"}]},
    "a packed sequence": lambda: pack_sequence([torch.ones(2)]),
    "what has no equality": NoEquality,
    "what cannot be compared": lambda: [Quarrelsome(), Item(torch.ones(2))],
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_made_twice_alike_has_the_same(name):
    assert content_hash(SAME[name]()) == content_hash(SAME[name]())


DIFFERENT = {
    "a number of many": (torch.zeros(100_000), torch.zeros(100_000).index_fill(0, LAST, 1)),
    "a bit": (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 2**-22])),
    "the sign of zero": (torch.tensor(0.0), torch.tensor(-0.0)),
    "a NaN": (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0])),
    "a sparse tensor": (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
    "a conjugate": (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
    "the shape": (torch.ones(2, 3), torch.ones(3, 2)),
    "the type of numbers": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "the view": (torch.arange(4).reshape(2, 2), torch.arange(4).reshape(2, 2).T),
    "the kind": (torch.ones(1), np.ones(1)),
    "integer and float": (1, 1.0),
    "type of arrays": (np.zeros(2, np.int32), np.zeros(2, np.float32)),
    "array of objects": (np.array(["a", 1], dtype=object), np.array(["a", 2], dtype=object)),
    "shape of objects": (np.full((1, 2), None), np.full((2, 1), None)),
    "NaN and number": (NAN, 1.0),
    "text": ("a", "b"),
    "a value": ({"x": 1, "y": [torch.ones(1)]}, {"x": 1, "y": [torch.zeros(1)]}),
    "a key": ({"x": 1}, {"y": 1}),
    "a further item": ([1], [1, 2]),
    "something and nothing": (1, None),
    "one part of two, of which one cannot be compared": ([Quarrelsome(), 1], [Quarrelsome(), 2]),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_in_anything_has_another(name):
    one, other = DIFFERENT[name]
    assert content_hash(one) != content_hash(other)
    assert content_hash({"nested": [one]}) != content_hash({"nested": [other]})


@pytest.mark.filterwarnings("ignore:.*quantize")  # they are deprecated
def test_quantized_tensors_are_told_apart():
    numbers = [
        torch.quantize_per_tensor(torch.ones(2) * n, 0.1, 2, torch.quint8) for n in (1, 1, 2)
    ]
    first, same, other = map(content_hash, numbers)
    assert first == same != other


def test_images_are_the_same_if_their_pixels_size_and_mode_are():
    others = [image([0, 1, 2, 3, 4, 6]), image(range(6), size=(3, 2)), image(range(6), mode="P")]
    assert len({content_hash(each) for each in [image(range(6)), *others]}) == 4
