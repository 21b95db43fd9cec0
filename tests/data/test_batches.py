"""Batches of any kind, moved and emptied. The "meta" device stands in for a GPU."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from pardata import Microbatches
from pardata.data._batch import emptied, moved, pinned, rows_of, tensors_of

CPU, OTHER = torch.device("cpu"), torch.device("meta")


class Pair(NamedTuple):
    image: torch.Tensor
    label: list


class Graph:
    """A batch of a kind of its own."""

    device = CPU

    def to(self, device):
        graph = Graph()
        graph.device = device
        return graph


def test_a_batch_for_the_cpu_is_left_as_it_is():
    batch = [torch.ones(2), object()]
    assert moved(batch, CPU) is batch


def test_what_is_on_the_cpu_is_pinned_and_all_else_stays_where_it_is(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: asked.append(tensor) or tensor)
    here, there, own = torch.ones(2), torch.ones(2, device=OTHER), Pinnable()
    batch = pinned({"a": [here, (there, "text")], "b": own, "c": 3})
    assert [tensor is here for tensor in asked] == [True]
    assert batch["a"][1][0] is there
    assert batch["a"][1][1] == "text"
    assert batch["b"] == "pinned"
    assert batch["c"] == 3


class Pinnable:
    def pin_memory(self):
        return "pinned"


def test_tensors_are_moved_at_any_depth():
    batch = {"a": [torch.ones(2), (torch.ones(1), "text")], "b": 3}
    there = moved(batch, OTHER)
    assert there["a"][0].device == there["a"][1][0].device == OTHER
    assert there["a"][1][1] == "text"
    assert there["b"] == 3
    assert batch["a"][0].device == CPU


def test_an_object_is_moved_by_its_own_method():
    assert moved([Graph()], OTHER)[0].device == OTHER


def test_an_object_without_such_a_method_stays():
    thing = object()
    assert moved([thing], OTHER) == [thing]


def test_a_packed_sequence_is_moved_as_a_whole():
    # Its batch sizes must stay on the CPU: its parts cannot be moved one by one.
    packed = moved((pack_sequence([torch.ones(2)]), 1), OTHER)[0]
    assert packed.data.device == OTHER
    assert packed.batch_sizes.device == CPU


def change(kind, batch):
    return emptied(batch) if kind == "emptied" else moved(batch, OTHER)


@pytest.mark.parametrize("kind", ["emptied", "moved"])
def test_containers_keep_their_type(kind):
    point = namedtuple("point", ["x", "y"])  # noqa: PYI024  # the untyped kind must work too
    tensor = torch.ones(2, 3)
    assert type(change(kind, (tensor,))) is tuple
    assert type(change(kind, [tensor])) is list
    assert type(change(kind, {"a": tensor})) is dict
    assert type(change(kind, OrderedDict(a=tensor))) is OrderedDict
    assert type(change(kind, UserDict(a=tensor))) is UserDict
    assert type(change(kind, point(tensor, [tensor]))) is point
    assert type(change(kind, Pair(tensor, []))) is Pair
    assert change(kind, ()) == ()
    assert change(kind, []) == []
    assert change(kind, {}) == {}


@pytest.mark.parametrize("kind", ["emptied", "moved"])
def test_a_defaultdict_keeps_its_factory_and_the_input_its_values(kind):
    batch = defaultdict(list, a=torch.ones(2))
    changed = change(kind, batch)
    assert changed.default_factory is list
    assert list(changed) == ["a"]
    assert batch["a"].shape == (2,)
    assert batch["a"].device == CPU


def test_a_read_only_mapping_becomes_a_dict():
    assert emptied(MappingProxyType({"a": torch.ones(2)}))["a"].shape == (0,)


def test_emptied_tensors_keep_dtype_and_other_dimensions():
    batch = [torch.ones(4, 3, 2, dtype=torch.float16), torch.zeros(4, dtype=torch.bool)]
    image, label = emptied(batch)
    assert (image.shape, image.dtype) == ((0, 3, 2), torch.float16)
    assert (label.shape, label.dtype) == ((0,), torch.bool)
    assert batch[0].shape == (4, 3, 2)


def test_emptied_strings_are_no_strings():
    assert emptied(["a", "b"]) == []
    assert emptied(("a", b"b")) == ()
    assert emptied([torch.ones(1), ("a",)])[1] == ()


def test_emptied_empty_batches_stay_empty():
    assert emptied(torch.ones(0, 3)).shape == (0, 3)
    assert emptied([]) == []


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (object(), "object"),
        (3, "int"),
        ([torch.ones(1), None], "NoneType"),
        ({"a": [1.5]}, "float"),
        ("text", "str"),
        (torch.tensor(3), "Tensor without dimensions"),
        (pack_sequence([torch.ones(2)]), "PackedSequence"),
        (Pair("a", "b"), "str"),
    ],
)
def test_what_has_no_rows_is_refused_with_a_cure(batch, kind):
    with pytest.raises(TypeError) as caught:
        emptied(batch)
    assert str(caught.value) == (
        f"a batch must be made of tensors, dicts, lists and tuples for a rank to get none of its "
        f"rows, but this one holds a {kind}: use drop_last=True, or a batch size that "
        f"leaves every rank a sample"
    )


def found_in(batch):
    return [int(tensor) for tensor in tensors_of(batch)]


def test_tensors_are_found_in_order_and_once_each_however_they_are_nested():
    one, two, three = (torch.tensor(number) for number in (1, 2, 3))
    assert found_in({"a": one, "b": [two, (three,)]}) == [1, 2, 3]
    assert found_in([one, "text", one, Pair(two, [three])]) == [1, 2, 3]


def test_a_stand_in_is_found_too_for_it_is_run_like_the_others():
    # On a GPU its memory must not be taken by the stream that runs ahead.
    where = {"epoch": 0, "step": 0, "first": 1, "counts": (2, 2, 2)}
    assert found_in(Microbatches([], **where, stand_in=[torch.tensor(7)])) == [7]
    own = Microbatches([torch.tensor(1), torch.tensor(2)], **where)
    assert found_in(own) == [1, 2]


# --- rows ---


@pytest.mark.parametrize("index", [5, -6])
def test_an_index_out_of_range_is_told_before_it_reaches_another_device(index):
    # There it would be no error but the end of the process: "meta" stands for a GPU.
    with pytest.raises(IndexError, match=f"index {index} is out of range for 5 samples"):
        rows_of(torch.empty(5, 2, device="meta"), torch.tensor([1, index]))


def test_rows_may_be_on_another_device_than_their_indices():
    rows = rows_of(torch.empty(5, 2, device="meta"), torch.tensor([1, -5]))
    assert (rows.device.type, rows.shape) == ("meta", (2, 2))
