"""What becomes of a batch of any kind: read, moved, emptied. The "meta" device stands for a GPU."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from common_data import Numbers, loader_of, steps
from on_ranks import caught, run
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import IterableDataset, Subset, TensorDataset, get_worker_info

from pardata import Microbatches
from pardata.data._batch import iter_tensors

CPU, OTHER = torch.device("cpu"), torch.device("meta")
Point = namedtuple("Point", ["x", "y"])  # noqa: PYI024  # the untyped kind must work too


class Pair(NamedTuple):
    image: torch.Tensor
    label: list


class Graph:
    """A batch of a kind of its own."""

    def __init__(self, device=CPU):
        self.device = device

    def to(self, device):
        return Graph(device)


# --- moved ---


def moved(batch):
    return next(iter(loader_of(1, 1, collate_fn=lambda _: batch, device=OTHER)))


def test_tensors_are_moved_at_any_depth_and_objects_by_their_own_method():
    thing = object()
    packed = pack_sequence([torch.ones(2)])
    batch = {"a": [torch.ones(2), (torch.ones(1), "text")], "b": 3, "c": [Graph(), thing, packed]}
    there = moved(batch)
    assert there["a"][0].device == there["a"][1][0].device == OTHER
    assert (there["a"][1][1], there["b"]) == ("text", 3)
    assert there["c"][0].device == OTHER
    assert there["c"][1] is thing
    # Its batch sizes must stay on the CPU: its parts cannot be moved one by one.
    assert (there["c"][2].data.device, there["c"][2].batch_sizes.device) == (OTHER, CPU)
    assert batch["a"][0].device == batch["c"][0].device == CPU


@pytest.mark.parametrize("device", ["auto", None, "cpu", torch.device("cpu")])
def test_on_a_cpu_batches_are_left_as_they_were_read(device):
    made = []

    def collate(samples):
        made.append({"x": [torch.tensor(samples), object()]})
        return made[-1]

    for number, batch in enumerate(loader_of(7, 3, collate_fn=collate, device=device)):
        assert batch is made[number]


# --- without rows ---

CONTAINERS = [
    (torch.ones(1, 3), torch.ones(1)),
    [torch.ones(1), torch.ones(1)],
    OrderedDict(a=torch.ones(1)),
    UserDict(a=torch.ones(1)),
    defaultdict(list, a=torch.ones(1)),
    Point(torch.ones(1), [torch.ones(1), torch.ones(1)]),
    Pair(torch.ones(1), []),
    {},
    MappingProxyType({"a": torch.ones(1)}),
]
PLAIN = [
    *(torch.ones(1, 3, 2, dtype=torch.float16), torch.zeros(1, dtype=torch.bool)),
    *(torch.ones(0, 3), ["a", "b"], ("a", b"b"), [torch.ones(1), ("a",)]),
]
REFUSED = [
    (object(), "object"),
    (3, "int"),
    ("text", "str"),
    (torch.tensor(3), "Tensor without dimensions"),
    (torch.ones(2, 1), "Tensor of shape (2, 1), not of 1 row(s)"),
    (pack_sequence([torch.ones(2)]), "PackedSequence"),
    ([(torch.ones(3), 1)], "list of one item, which may be a sample"),
]


def _emptied(batches):
    """Return what a rank without samples gets of each, or the error of all ranks."""
    loaders = [loader_of(1, 2, collate_fn=lambda _, b=batch: b) for batch in batches]
    return [caught(next, iter(loader)) for loader in loaders]


def kinds_of(batch):
    """Return the types of a batch and of all that is in it."""
    if isinstance(batch, dict | UserDict):
        return type(batch), [kinds_of(value) for value in batch.values()]
    if isinstance(batch, list | tuple):
        return type(batch), [kinds_of(value) for value in batch]
    return type(batch)


def test_a_batch_without_rows_keeps_its_containers():
    _, found = run(_emptied, CONTAINERS[:-1], world_size=2)
    for batch, whole in zip(found, CONTAINERS, strict=False):
        assert kinds_of(batch) == kinds_of(whole)
    assert found[4].default_factory is list
    assert found[0][0].shape == (0, 3)
    assert moved(CONTAINERS[-1]).keys() == {"a"}  # a read-only mapping becomes a dict


def test_tensors_without_rows_keep_their_dtype_and_strings_are_none():
    _, (halves, flags, empty, names, others, both) = run(_emptied, PLAIN, world_size=2)
    assert (halves.shape, halves.dtype) == ((0, 3, 2), torch.float16)
    assert (flags.shape, flags.dtype, empty.shape) == ((0,), torch.bool, (0, 3))
    assert (names, others, both[1]) == ([], (), ())


def test_what_has_no_rows_is_refused_on_every_rank_with_a_cure():
    for found in run(_emptied, [batch for batch, _ in REFUSED], world_size=2):
        for raised, (_, kind) in zip(found, REFUSED, strict=True):
            assert str(raised).startswith(
                "TypeError: a batch must be tensors with a row for each sample if a rank gets none"
            )
            assert f"` is a {kind}: put samples first" in raised.text
            assert "or pass `microbatch_size` or drop_last=True to make_loader" in raised.text


def test_what_has_no_rows_is_named_by_its_place():
    batch = {"x": torch.ones(1, 3), "sizes": [1.5, torch.ones(1)]}
    for (found,) in run(_emptied, [batch], world_size=2):
        assert "but `batch['sizes'][0]` is a float: put samples" in found.text


# --- what is in it, as `backward` and the streams of a GPU ask ---


class Named:
    __slots__ = ("name", "not_set")


class Slotted(Named):
    __slots__ = ("inside",)

    def __init__(self, name, inside):
        self.name, self.inside = name, inside


def found_in(batch):
    return [int(tensor) for tensor in iter_tensors(batch)]


def test_tensors_are_found_in_order_and_once_each_however_they_are_nested():
    one, two, three = (torch.tensor(number) for number in (1, 2, 3))
    own = Graph()
    own.nodes, own.self = [two, own], own
    assert found_in({"a": one, "b": [two, (three,)]}) == [1, 2, 3]
    assert found_in([one, "text", one, Pair(two, [three])]) == [1, 2, 3]
    assert found_in([own, UserDict(a=one, b=three)]) == [2, 1, 3]
    assert found_in([{one}, frozenset([two]), Slotted(three, [one])]) == [1, 2, 3]
    assert found_in(["text", b"bytes", range(10**12), Slotted(1, None)]) == []
    where = {"epoch": 0, "step": 0, "first": 1, "counts": (2, 2, 2)}
    assert found_in(Microbatches([one, two], **where)) == [1, 2]
    # On a GPU its memory must not be taken by the stream that runs ahead.
    assert found_in(Microbatches([], **where, placeholder=[three])) == [3]


# --- rows of data that are on another device ---


@pytest.mark.parametrize("index", [5, -6])
def test_an_index_out_of_range_is_told_before_it_reaches_another_device(index):
    # There it would be no error but the end of the process.
    data = TensorDataset(torch.empty(5, 2, device=OTHER))
    with pytest.raises(RuntimeError, match=f"index {index} is out of range for 5 samples"):
        list(loader_of(data, 2, sampler=[1, index], device=None))
    ((rows,),) = loader_of(data, 2, sampler=[1, -5], device=None)
    assert (rows.device, rows.shape) == (OTHER, (2, 2))


# --- datasets that read a whole batch ---


class Whole(Numbers):
    """Indexed by whole batches, of which it makes what `form` says."""

    def __init__(self, form=list):
        super().__init__(10)
        self.form = form

    def __getitem__(self, index):
        raise AssertionError

    def __getitems__(self, indices):
        return self.form([indices_ok(index) ** 2 for index in indices])


def indices_ok(index):
    assert type(index) is int  # as those of a list are
    return index


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_data_set_that_reads_whole_batches_is_asked_for_them(reproducible):
    options = {"sampler": [3, 1, 2], "drop_last": False, "reproducible": reproducible}
    assert steps(loader_of(Whole(), 2, **options)) == [[9, 1], [4]]
    assert list(loader_of(Whole(), 2, collate_fn=sum, **options)) == [10, 4]
    subset = Subset(Subset(Whole(), [5, 6, 7]), [2, 1])
    assert steps(loader_of(subset, 2, reproducible=reproducible)) == [[49, 36]]


def test_getitems_samples_are_collated_and_batches_are_kept():
    def first(form, **options):
        return next(iter(loader_of(Whole(form), 2, sampler=[2, 1], **options)))

    collated = first(lambda numbers: [(number, number / 2) for number in numbers])
    assert [part.tolist() for part in collated] == [[4, 1], [2.0, 0.5]]
    assert first(torch.tensor).tolist() == [4, 1]
    assert first(lambda numbers: {"x": numbers}) == {"x": [4, 1]}
    assert first(lambda numbers: (numbers, len(numbers))) == ([4, 1], 2)
    assert first(tuple, collate_fn=sum) == 5  # a collate_fn has the last word


def test_a_read_error_names_the_batch_or_the_single_sample():
    with pytest.raises(RuntimeError, match=r"^samples \[0, 4\] could not be read on rank 0: Index"):
        list(loader_of(Subset(Whole(), [1]), 2, sampler=[0, 4]))
    for indices in ([0, 4], [0, -9]):
        with pytest.raises(RuntimeError, match=r"^samples \[0, .*\] could .* rank 0: IndexError"):
            list(loader_of(TensorDataset(torch.arange(3)), 2, sampler=indices))
    with pytest.raises(RuntimeError, match=r"^sample 1 could not be read on rank 0: KeyError"):
        list(loader_of(Subset({0: 0}, [0, 5]), 2))


def _seen_by_a_worker(worker):
    through = get_worker_info().dataset
    through.offset = 10 * through.scale + len(through)
    assert not hasattr(through, "color")


class Scaled(Numbers):
    scale, offset = 2, 0

    def __getitem__(self, index):
        return index + self.offset


def test_a_worker_reads_and_sets_attributes_of_the_dataset():
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = loader_of(Scaled(4), 2, worker_init_fn=_seen_by_a_worker, **options)
    assert steps(loader) == [[24, 25], [26, 27]]


# --- what cannot be collated ---


def _uncollated(data, options):
    return caught(lambda: list(loader_of(data, 4, **options)))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ([{"x": 1}] * 3 + [{"y": 1}], "KeyError"),
        ([torch.ones(1)] * 3 + [torch.ones(2)], "RuntimeError"),
    ],
)
def test_what_cannot_be_collated_names_the_samples_and_the_rank(data, kind):
    raised = _uncollated(data, {"sampler": [3, 2, 1, 0]})
    start = f"RuntimeError: samples [3, 2, 1, 0] could not be collated on rank 0: {kind}: "
    assert str(raised).startswith(start)
    one, other = run(_uncollated, [1, None, 2, 3], {}, world_size=2)
    assert str(one).startswith("RuntimeError: samples [0, 1] could not be collated on rank 0: ")
    assert [batch.tolist() for batch in other] == [[2, 3]]  # the error is told where they meet


class Listed(IterableDataset):
    def __iter__(self):
        return iter([1, 2, 3, 4, 5, None])


def test_so_does_that_of_a_stream():
    raised = _uncollated(Listed(), {})
    assert str(raised).startswith("RuntimeError: samples [4, 5] could not be collated on rank 0")
