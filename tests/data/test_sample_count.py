"""How many samples a batch has that a loader has not counted: of columns rows, of lists items."""

import pickle
from typing import NamedTuple

import pytest
import torch
from on_ranks import run
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from pardata import backward, make_loader, world, wrap_model
from pardata.data._sample_count import leave_count, samples_of, samples_read


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
MASKS = [torch.zeros(8 + i, 8, dtype=torch.long) for i in range(4)]

# What default_collate makes of these samples, five of them: rows count.
SAMPLES = {
    "a tensor": rows(2),
    "a number": 1.5,
    "x, y": (rows(2), 3),
    "x, y of one kind": (rows(2), rows(1)),
    "two views": (image(), image()),
    "two views, y": ((image(), image()), 3),
    "y, two views": (3, (image(), image())),
    "three columns": (rows(2), rows(3), rows(3, 2)),
    "a dict": {"x": rows(2), "y": 3, "name": "a"},
    "a dict, y": ({"ids": rows(7), "mask": rows(7)}, 3),
    "a dict of dicts": {"inputs": {"ids": rows(7)}, "y": 3},
    "a dict of tuples": {"pair": (rows(2), rows(2)), "y": 3},
    "text, x": ("a", rows(2)),
    "a named tuple": Pair(rows(2), rows(3)),
    "a pair of named tuples": (Pair(rows(2), rows(3)), 1),
}

COUNTED = {
    # rows of the first tensor
    "columns of unlike kind and length": ((rows(4, 3, 8, 8), labels(9)), 4),
    "images, boxes of all of them": ([rows(4, 3, 8, 8), rows(9, 6)], 4),
    "a tensor, a list": ((rows(4, 3), [boxes(1), boxes(2), boxes(0), boxes(5)]), 4),
    "a column of a length of its own in a dict": ({"x": rows(4, 3), "weights": rows(10)}, 4),
    "text first": ({"name": ["a"], "x": rows(4)}, 4),
    "an object": (Object(x=rows(4, 2), y=labels(4)), 4),
    "no rows": ((rows(0, 3), labels(0)), 0),
    "no rows, of lists": (([i[:0] for i in IMAGES], [boxes(0)] * 4), 0),
    # items of lists
    "tuple(zip(*samples))": (tuple(zip(*detection(1, 2, 0, 5), strict=True)), 4),
    "as many boxes as channels": (tuple(zip(*detection(3, 3, 3, 3), strict=True)), 4),
    "one image": (tuple(zip(*detection(3), strict=True)), 1),
    "two images": (tuple(zip(*detection(3, 1), strict=True)), 2),
    "lists": ((IMAGES, [boxes(1), boxes(2), boxes(0), boxes(5)]), 4),
    "images and numbers": ((IMAGES, [1, 2, 3, 4]), 4),
    "images and a tensor of labels": ((IMAGES, labels(4)), 4),
    "images and names": ((IMAGES, ["a", "b", "c", "d"]), 4),
    "a dict of lists": ({"images": IMAGES, "targets": [boxes(i) for i in range(4)]}, 4),
    "a dict of images and names": ({"image": IMAGES, "name": ["a", "b", "c", "d"]}, 4),
    "samples, a tuple each": (detection(1, 2, 0, 5), 4),
    "samples with a number": ([(image(), 3), (image(), 4)], 2),
    "samples, a dict each": ([{"image": i, "boxes": rows(4, 4), "height": 8} for i in IMAGES], 4),
    "a dict each, of tensors": ([{"image": i, **boxes(n)} for n, i in enumerate(IMAGES)], 4),
    "graphs in a list": ([graph(4, 6), graph(3, 1), graph(9, 9)], 3),
    "graphs and labels": (([graph(4, 6), graph(3, 1), graph(9, 9)], labels(3)), 3),
}

UNTOLD = {
    "sequences of unlike length": [rows(5), rows(7), rows(2)],
    "lists of unlike length": (IMAGES, [boxes(1), boxes(2)]),
    "images alone in a dict": {"images": IMAGES},
    "images and masks": (IMAGES[:3], MASKS[:3], labels(4)),
    "samples of one kind": [(rows(2), rows(3)), (rows(4), rows(5)), (rows(6), rows(7))],
    "samples that may be two views": [{"image": image()}, {"image": image()}],
    "a graph": graph(4, 6),
    "a graph of many, labels": (graph(4, 6), labels(2)),
    "a packed sequence": pack_sequence([rows(5), rows(3)]),
    "a packed sequence, labels": (pack_sequence([rows(5)]), labels(1)),
    "a number first": (torch.tensor(1.0), rows(3)),
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_of_what_default_collate_makes_the_rows_count(name, number):
    assert samples_of(default_collate([SAMPLES[name]] * number)) == number


@pytest.mark.parametrize("name", COUNTED)
def test_of_columns_the_rows_of_the_first_count_and_of_lists_the_items(name):
    batch, number = COUNTED[name]
    assert samples_of(batch) == number


@pytest.mark.parametrize("name", UNTOLD)
def test_what_cannot_be_told_asks_for_a_count(name):
    with pytest.raises(TypeError, match=r"`batch` must tell how many samples .*: pass `count`"):
        samples_of(UNTOLD[name])


# What a loader has read for a batch, and what a collate function has made of it.
READ = {
    "rows": ((rows(4, 2), labels(4)), 4, 4),
    "time first, targets": ((rows(7, 4, 2), labels(4)), 4, 4),
    "time first, longer than there are samples": (rows(7, 4, 2), 4, 4),
    "a graph": (graph(9, 6), 2, 2),
    "images alone in a dict": ({"images": IMAGES}, 4, 4),
    "sequences of unlike length": ([rows(5), rows(7), rows(2)], 3, 3),
    "no tensors": (["text", "text"], 2, 2),
    "samples left out": ((rows(3, 5), labels(3)), 4, 3),
    "images left out": (tuple(zip(*detection(1, 2, 0), strict=True)), 6, 3),
    "two crops of each": (rows(8, 3), 4, 4),
    "none left": ((rows(0, 5), labels(0)), 4, 0),
}


@pytest.mark.parametrize("name", READ)
def test_the_samples_that_were_read_count_unless_some_were_left_out(name):
    batch, read, wanted = READ[name]
    assert samples_of(batch, read) == wanted
    leave_count(batch, read)
    if name != "no tensors":
        assert samples_read(batch) == read
        assert samples_of(batch) == wanted


def test_samples_along_a_later_dimension_may_have_been_left_out_and_ask_for_a_count():
    text = "this Tensor may be of 3 or 4 samples: pass `count`"
    with pytest.raises(TypeError, match=text):
        samples_of(rows(3, 4, 2), 4)


def test_the_number_goes_where_the_tensor_goes_and_not_to_what_is_made_of_it():
    x, y = rows(7, 4), labels(4)
    leave_count([x, y], 4)
    assert samples_read({"x": x, "more": y}) == 4
    assert samples_read(pickle.loads(pickle.dumps(x))) == 4
    assert samples_read((x[:2], y[:2])) is samples_read([x * 2]) is None
    leave_count(["a text alone"], 1)  # nothing to leave it on


class Detection:
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.full((3, 8, 8), float(index)), boxes(index)


class Detector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, images):
        return torch.stack([image.mean() * self.weight for image in images])


def zipped(samples):
    return tuple(zip(*samples, strict=True))


def _detected(collate_fn, images_of):
    model = wrap_model(Detector(), "ddp" if world().size > 1 else "none")
    (batch,) = make_loader(Detection(), 5, collate_fn=collate_fn, num_workers=0)
    loss = backward(model, lambda model, batch: model(images_of(batch)).mean(), batch)
    return loss.item(), model.weight.grad.item()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_image_of_a_detection_batch_counts_alike(size):
    for found in run(_detected, zipped, _first, world_size=size):
        assert found == pytest.approx((2.0, 2.0))
    for found in run(_detected, list, _firsts, world_size=size):
        assert found == pytest.approx((2.0, 2.0))


def _first(batch):
    return batch[0]


def _firsts(batch):
    return [image for image, _ in batch]
