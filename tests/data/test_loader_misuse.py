"""What does nothing, or something else, with a loader or its batches, is told."""

import pytest
import torch
from logged import log_of
from on_ranks import caught, run
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from pardata import Checkpointer, all_reduce_sum, backward, make_loader, wrap_model

DATA = torch.arange(12.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("batch_size", 16), ("dataset", DATA), ("drop_last", True), ("shuffle", True)),
        *(("collate_fn", list), ("num_workers", 2), ("batch_transform", list), ("seed", 1)),
        *(("sampler", range(4)), ("prefetch_factor", 2)),
    ],
)
def test_an_argument_that_is_assigned_raises_as_with_dataloader(name, value):
    loader = make_loader(DATA, 4, num_workers=0)
    with pytest.raises(AttributeError, match=f"`{name}` of a loader .*: make another loader"):
        setattr(loader, name, value)
    assert [len(batch) for batch in loader] == [4, 4, 4]
    loader.note = "a name of the user's"


def test_a_checkpointer_keeps_its_arguments(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(AttributeError, match="`keep` of a checkpointer must not change to 5: make"):
        checkpointer.keep = 5


def test_a_new_iterator_in_each_step_is_warned_of_once():
    loader = make_loader(DATA, 4, num_workers=0)
    with log_of() as log:
        next(iter(loader))
        next(iter(loader))
        for _ in loader.epochs(2):
            next(iter(loader))  # a look
            assert len(list(loader)) == 3
        assert log.lines == []
        for _ in loader.epochs(4):
            assert [next(iter(loader)).tolist() for _ in range(3)] == [[0, 1, 2, 3]] * 3
    assert ["make one iterator before the steps" in line for line in log.lines] == [True]


# --- samples that are not the rows


def texts(batch_first):
    """Count texts by the dimension that has them."""
    data = [torch.ones(1 + n % 5) for n in range(10)]

    def collate(samples):
        return pad_sequence(samples, batch_first=batch_first)

    loader = make_loader(data, 3, num_workers=0, collate_fn=collate)
    return str(
        caught(lambda: all_reduce_sum(sum(x.shape[0 if batch_first else 1] for x in loader)))
    )


@pytest.mark.parametrize("size", [2, 3])
def test_an_empty_share_of_a_batch_with_time_first_is_an_error(size):
    assert run(texts, True, world_size=size) == ["10"] * size
    for error in run(texts, False, world_size=size):
        assert "`batch` is a Tensor of shape (5, 1), not of 1 row(s): put samples" in error
        assert "batch_first=True" in error


def boxes(with_images):
    """Return how many batches come before the error, and the error."""
    count = 0

    def collate(samples):
        return (torch.stack(samples), samples) if with_images else samples

    def read():
        nonlocal count
        for _ in make_loader([torch.ones(4, 3)] * 13, 6, num_workers=0, collate_fn=collate):
            count += 1

    error = str(caught(read))
    return count, error


@pytest.mark.parametrize("with_images", [False, True])
def test_a_list_of_samples_that_cannot_be_emptied_raises_at_once(with_images):
    for size in (2, 3):
        for count, error in run(boxes, with_images, world_size=size):
            assert count == 0
            assert "a batch must be tensors with a row for each sample if a rank gets none" in error
            assert "pass `microbatch_size` or drop_last=True to make_loader" in error


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, batch):
        return self.layer(batch[0][: len(batch[1])]).square().mean()


@pytest.mark.parametrize("kind", [tuple, list])
def test_columns_of_unlike_lengths_ask_for_a_count(kind):
    model, batch = wrap_model(Graph()), kind([torch.ones(10, 1), torch.arange(4)])

    def loss_fn(model, batch):
        return model(batch)

    with pytest.raises(TypeError, match="pass `count`"):
        backward(model, loss_fn, batch)
    assert backward(model, loss_fn, batch, count=lambda batch: len(batch[1])).ndim == 0
