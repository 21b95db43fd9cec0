"""How many samples a batch has: what a loader has read for it, else its rows, or its items."""

import copy
import gc
import logging
import weakref
from collections import UserDict
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from logged import log_of
from on_ranks import caught, run
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from pardata import Microbatches, backward, make_loader, unwrap, wrap_model
from pardata.data._batch import DeliveredBatches, ReadRecord, delivered, iter_tensors, num_samples


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Object:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def rows(*shape):
    return torch.zeros(*shape)


def labels(number):
    return torch.zeros(number, dtype=torch.long)


def image(size=8):
    return torch.zeros(3, size, size)


def boxes(number):
    return {"boxes": torch.zeros(number, 4), "labels": labels(number)}


def graph(nodes, edges):
    return Object(x=rows(nodes, 5), edge_index=torch.zeros(2, edges), num_graphs=2)


def detection(*numbers):
    """Return samples as a dataset of images and targets has them."""
    return [(image(8 + number), boxes(number)) for number in numbers]


IMAGES = [image(8), image(9), image(8), image(10)]

# What default_collate makes of these samples: rows count.
SAMPLES = {
    "a number": 1.5,
    "x, y": (rows(2), 3),
    "y, two views": (3, (image(), image())),
    "a dict of dicts": {"inputs": {"ids": rows(7)}, "y": 3},
    "texts": "a",
    "a dict of tuples": {"pair": (rows(2), rows(2)), "y": 3},
    "a pair of named tuples": (Pair(rows(2), rows(3)), 1),
}

COUNTED = {
    # rows of the first tensor
    "a tensor, a list": ((rows(4, 3), [boxes(1), boxes(2), boxes(0), boxes(5)]), 4),
    "a column of a length of its own in a dict": ({"x": rows(4, 3), "weights": rows(10)}, 4),
    "a number first": ((torch.tensor(1.0), rows(3)), 3),
    "a packed sequence, labels": ((pack_sequence([rows(5), rows(3)]), labels(2)), 2),
    "graphs as one, labels": ((graph(4, 6), labels(2)), 2),
    "of a class of mappings": (UserDict(ids=torch.zeros(4, 7), mask=torch.zeros(4, 7)), 4),
    "an object": (Object(x=rows(4, 2), y=labels(4)), 4),
    "no rows, of lists": (([i[:0] for i in IMAGES], [boxes(0)] * 4), 0),
    # items of lists
    "images and names": ((IMAGES, ["a", "b", "c", "d"]), 4),
    "a dict each, of tensors": ([{"image": i, **boxes(n)} for n, i in enumerate(IMAGES)], 4),
    "graphs and labels": (([graph(4, 6), graph(3, 1), graph(9, 9)], labels(3)), 3),
}

UNTOLD = {
    "images, boxes of all of them": [rows(4, 3, 8, 8), rows(9, 6)],
    "sequences of unlike length": [rows(5), rows(7), rows(2)],
    "lists of unlike length": (IMAGES, [boxes(1), boxes(2)]),
    "images and masks": (IMAGES, [torch.zeros(3, 8, 8)] * 4),
    "a list for each field": tuple(zip(*detection(3, 3, 3, 3), strict=True)),
    "a dict of lists": {"images": IMAGES, "targets": [boxes(i) for i in range(4)]},
    "samples with a number": [(image(), 3), (image(), 4)],
    "numbers": 1.5,
    "samples of one kind": [(rows(2), rows(3)), (rows(4), rows(5)), (rows(6), rows(7))],
    "a graph": graph(4, 6),
    "a packed sequence": pack_sequence([rows(5), rows(3)]),
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("number", [1, 2, 5])
def test_of_what_default_collate_makes_the_rows_count(name, number):
    assert num_samples(default_collate([SAMPLES[name]] * number)) == number


@pytest.mark.parametrize("name", COUNTED)
def test_columns_count_their_rows_and_lists_their_items(name):
    batch, number = COUNTED[name]
    assert num_samples(batch) == number


@pytest.mark.parametrize("name", UNTOLD)
def test_what_cannot_be_told_asks_for_a_count(name):
    with pytest.raises(TypeError, match=r"`batch` must tell how many samples .*: pass `count`"):
        num_samples(UNTOLD[name])


# Batches that a loader yields, whose rows are not what it has read.
DELIVERED = {
    "a tensor": lambda: rows(4, 2),
    "columns": lambda: [rows(4, 2), labels(4)],
    "a dict": lambda: {"x": rows(4, 2), "names": ["a"] * 4},
    "a class of mappings": lambda: UserDict(x=rows(4)),
    "objects": lambda: [graph(4, 6), graph(3, 1)],
    "packed": lambda: pack_sequence([rows(5), rows(3)]),
    "time first": lambda: (rows(7, 4, 2), labels(4)),
    "a number first": lambda: (0.5, None, rows(4)),
}


@pytest.mark.parametrize("name", DELIVERED)
def test_the_object_that_a_loader_yielded_counts_what_was_read(name):
    batch = DELIVERED[name]()
    delivered.add(batch, ReadRecord(5, 1))
    assert num_samples(batch) == 5
    delivered.add(batch, ReadRecord(6, 1))  # in the next epoch
    assert num_samples(batch) == 6


@pytest.mark.parametrize("name", DELIVERED)
def test_all_parts_in_another_container_count_what_was_read(name):
    batch = DELIVERED[name]()
    delivered.add(batch, ReadRecord(5, 1))
    if isinstance(batch, list | tuple):
        assert num_samples(list(batch)) == num_samples(dict(enumerate(batch))) == 5
    if isinstance(batch, dict):
        assert num_samples(dict(batch)) == num_samples(list(batch.values())) == 5


def test_a_part_of_a_batch_counts_its_rows():
    x, y = rows(7, 4), labels(7)
    delivered.add([x, y], ReadRecord(5, 1))
    for other in ((x[:2], y[:2]), [x], (y, x), {"x": x}, (x * 2, y), copy.deepcopy([x, y])):
        assert delivered.get(other) is None
        assert num_samples(other) == len(next(iter_tensors(other)))
    assert num_samples(x) == 7


def test_a_batch_that_was_changed_in_place_counts_its_rows():
    batch, samples = {"x": rows(7, 4), "y": labels(7)}, [boxes(1), boxes(2), boxes(3)]
    delivered.add(batch, ReadRecord(5, 1))
    delivered.add(samples, ReadRecord(5, 1))
    batch["x"], batch["y"] = batch["x"][:2], batch["y"][:2]
    del samples[2:]
    assert (num_samples(batch), num_samples(samples)) == (2, 2)


def test_nothing_is_kept_alive_and_what_is_gone_is_forgotten():
    before = len(delivered._records)
    batches = [make() for make in DELIVERED.values()]
    for batch in batches:
        delivered.add(batch, ReadRecord(5, 1))
    assert len(delivered._records) == before + len(batches)
    tensors = [weakref.ref(batches[0]), weakref.ref(batches[1][0])]
    del batch, batches
    gc.collect()
    assert [tensor() for tensor in tensors] == [None, None]
    assert len(delivered._records) == before
    delivered.add(texts := ["a text", 3], ReadRecord(2, 1))
    assert delivered.get(texts) is None
    assert len(delivered._records) == before


def test_records_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr("pardata.data._batch._MOST", 3)
    records, batches = DeliveredBatches(), [(rows(7), number) for number in range(9)]
    for number, batch in enumerate(batches):
        records.add(batch, ReadRecord(number, 1))
    assert [records.get(batch) for batch in batches[:6]] == [None] * 6
    assert [records.get(batch).samples for batch in batches[6:]] == [6, 7, 8]


def test_a_tensor_with_the_id_of_a_gone_one_has_no_record():
    batch = [torch.zeros(7, 2), labels(7)]
    delivered.add(batch, ReadRecord(5, 1))
    number = id(batch.pop())
    batch.append(next(each for each in [labels(7) for _ in range(1000)] if id(each) == number))
    assert delivered.get(batch) is None
    assert num_samples(batch) == 7


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, rows):
        return self.weight * rows


def packed(samples):
    return torch.cat(samples)[None]


def packed_pair(samples):
    return {"rows": torch.cat(samples)[None], "lengths": [len(sample) for sample in samples]}


def mean_of(model, batch):
    batch = batch["rows"] if isinstance(batch, dict) else batch
    return torch.stack([model(rows).mean() for rows in batch]).mean()


ANCHORS = torch.zeros(3, 2, dtype=torch.float64)


def with_anchors(samples):
    return ANCHORS, torch.cat(samples)[None]


def mean_after_anchors(model, batch):
    return mean_of(model, batch[1])


def first_rows(samples):
    return torch.stack([sample[0] for sample in samples]).view(1, -1)


def by_time(samples):
    return torch.stack(samples, 1), torch.zeros(len(samples))


def mean_by_time(model, batch):
    return model(batch[0]).mean()


# How samples become a batch of fewer or other rows, and what the loop does between.
WAYS = {
    "packed": (packed, mean_of),
    "packed, in a dict": (packed_pair, mean_of),
    "samples in a list": (list, mean_of),
    "a first tensor that all batches share": (with_anchors, mean_after_anchors),
    "transposed": (first_rows, mean_of),
    "time first": (by_time, mean_by_time),
}


BETWEEN = ("nothing", "evaluate", "keep", "unpack", "Microbatches.of", "pieces")


def steps_of(name, between):
    """Return loss and gradient of each step: nine samples, in shares of unlike length."""
    collate_fn, loss_fn = WAYS[name]
    data = [torch.full((4,), 3.0 * i, dtype=torch.float64) for i in range(9)]
    model, found = wrap_model(Doubling()), []
    options = {"collate_fn": collate_fn, "num_workers": 0}
    pieces = 2 if between == "pieces" else None
    train = make_loader(data, 5, microbatch_size=pieces, **options)
    batches = list(train) if between == "keep" else train
    for batch in batches:
        if between == "evaluate":
            for _ in make_loader(data, 2, distributed=False, **options):
                pass
        given = batch
        if between == "unpack":
            given = dict(batch) if isinstance(batch, dict) else batch
            given = tuple(batch) if type(batch) in (list, tuple) else given
        if between == "Microbatches.of":
            given = Microbatches.of([batch], step=len(found))
        unwrap(model).weight.grad = None
        loss = backward(model, loss_fn, given)
        found.append((loss.item(), unwrap(model).weight.grad.item()))
    return found


def steps_between(name):
    return {between: steps_of(name, between) for between in BETWEEN}


@pytest.mark.parametrize("name", WAYS)
def test_whatever_collate_fn_makes_of_samples_each_has_the_same_weight(name):
    wanted = [pytest.approx((6.0, 6.0)), pytest.approx((19.5, 19.5))]
    for size in (1, 2, 3):
        for told in run(steps_between, name, world_size=size):
            for between, found in told.items():
                assert found == wanted, (size, between)


def of_unpacked(parts, count):
    """Return the loss of a step of nine samples, of which rank 1 runs `parts` of its share."""
    data = [(torch.full((1 + i,), 3.0 * i, dtype=torch.float64), i) for i in range(9)]
    model, found = wrap_model(Doubling()), []
    run_backward = partial(backward, model, mean_of_fields, count=count)
    for x, y in make_loader(data, 9, collate_fn=fields, num_workers=0):
        given = (x[parts], y[parts]) if dist.get_rank() == 1 else (x, y)
        found.append(caught(run_backward, given))
    return found[0]


def fields(samples):
    return tuple(zip(*samples, strict=True))


def mean_of_fields(model, batch):
    return torch.stack([model(rows).mean() for rows in batch[0]]).mean()


def length_of_field(batch):
    return len(batch[0])


def test_a_slice_of_a_batch_of_lists_asks_for_a_count():
    for raised in run(of_unpacked, slice(1), None, world_size=2):
        assert "`batch` must tell how many samples it has" in raised.text
    wanted = sum(3 * i for i in range(6)) / 6
    assert run(of_unpacked, slice(1), length_of_field, world_size=2) == [pytest.approx(wanted)] * 2
    assert run(of_unpacked, slice(None), None, world_size=2) == [pytest.approx(12)] * 2


def warned(collate_fn, microbatch_size):
    data = [torch.full((4,), float(i), dtype=torch.float64) for i in range(16)]
    model = wrap_model(Doubling())
    options = {"collate_fn": collate_fn, "microbatch_size": microbatch_size, "num_workers": 0}
    with log_of("pardata", logging.WARNING) as log:
        for batch in make_loader(data, 8, **options):
            backward(model, mean_of, batch)
    return log.lines


def one_left_out(samples):
    return torch.stack([sample for sample in samples if sample[0] != 5])  # of two ranks the last's


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_an_unexpected_number_of_rows_is_logged_once(microbatch_size):
    for size in (1, 2):
        *others, (line,) = run(warned, one_left_out, microbatch_size, world_size=size, fresh=True)
        read = microbatch_size or 8 // size
        assert f"{read} samples were read, but `batch` looks like {read - 1}: pass `count`" in line
        assert others == [[]] * (size - 1)


@pytest.mark.parametrize("collate_fn", [list, torch.stack])
def test_rows_and_lists_of_what_was_read_are_no_news(collate_fn):
    assert run(warned, collate_fn, None, world_size=2, fresh=True) == [[], []]


class Unreadable(Dataset):
    """Of its ten samples those from 4 to 6 cannot be read, and are None."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return None if 4 <= index < 7 else torch.full((4,), float(index), dtype=torch.float64)


class LastUnreadable(Unreadable):
    def __getitem__(self, index):
        return None if index == 9 else torch.full((4,), float(index), dtype=torch.float64)


class UnreadableStream(IterableDataset):
    def __iter__(self):
        return map(Unreadable().__getitem__, range(10))


def whole_or_empty(samples):
    there = [sample for sample in samples if sample is not None]
    return torch.stack(there) if there else torch.zeros(0, 4, dtype=torch.float64)


def losses_without_them(data, microbatch_size, workers, batch_size=8):
    model, options = wrap_model(Doubling()), {"microbatch_size": microbatch_size}
    options |= {"collate_fn": whole_or_empty, "num_workers": workers}
    loader = make_loader(data, batch_size, **options)
    with log_of("pardata", logging.WARNING) as log:
        losses = [backward(model, mean_of_rows, batch) for batch in loader]
    return [loss.item() for loss in losses], [line for line in log.lines if "were read" in line]


@pytest.mark.parametrize("microbatch_size", [None, 2, 4])
@pytest.mark.parametrize("data", [Unreadable(), UnreadableStream()], ids=["map-style", "stream"])
def test_samples_that_are_none_and_left_out_count_nothing(data, microbatch_size):
    wanted = pytest.approx([(0 + 1 + 2 + 3 + 7) / 5, 8.5])
    for size, workers in ((1, 1), (2, 0), (3, 0)):
        if microbatch_size is None and size == 3:
            continue  # the last batch has no sample for each rank
        for losses, lines in run(
            losses_without_them, data, microbatch_size, workers, world_size=size
        ):
            assert (losses, lines) == (wanted, []), size


@pytest.mark.parametrize("size", [1, 2, 3])
def test_of_a_short_last_microbatch_what_is_left_counts(size):
    for losses, _ in run(losses_without_them, LastUnreadable(), 4, 0, 10, world_size=size):
        assert losses == pytest.approx([sum(range(9)) / 9])


def after_nothing_is_left(microbatch_size, strategy):
    """Return the loss of a step, and what the next ends in, which has no sample left."""
    data = TensorDataset(torch.arange(8.0, dtype=torch.float64))
    options = {"microbatch_size": microbatch_size, "collate_fn": below_four, "num_workers": 0}
    model = wrap_model(Doubling(), strategy)
    first, second = make_loader(data, 4, **options)
    loss = backward(model, mean_of_rows, first).item()
    return loss, caught(backward, model, mean_of_rows, second)


def mean_of_rows(model, rows):
    return model(rows).mean()


def below_four(samples):
    return torch.stack([x for (x,) in samples] or [torch.zeros(())])[
        : sum(x < 4 for (x,) in samples)
    ]


@pytest.mark.parametrize("microbatch_size", [None, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_step_that_counts_nothing_raises(microbatch_size, size):
    text = "a step must count something, but all its microbatches count 0: skip it"
    for loss, raised in run(after_nothing_is_left, microbatch_size, "auto", world_size=size):
        assert (loss, raised.type, raised.text) == (1.5, "ValueError", text)
