"""Reading samples: by whole batches where the data set can, and errors that name the sample."""

import pickle

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from pardata._reading import Reader, is_vectorised


class Whole(Dataset):
    """Indexed by whole batches."""

    name = "squares"

    def __len__(self):
        return 10

    def __getitem__(self, index):
        raise AssertionError

    def __getitems__(self, indices):
        return [index**2 for index in indices]


class Named(Exception):  # noqa: N818  # a user's own
    """Cannot be made from its text alone."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


class Failing(Dataset):
    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 2:
            raise self.error
        return index


def test_samples_come_in_the_order_asked_for():
    assert Reader("abc", rank=0).__getitems__([2, 0, 2]) == ["c", "a", "c"]


def test_a_data_set_that_reads_whole_batches_is_asked_for_them():
    assert Reader(Whole(), rank=0).__getitems__([3, 1]) == [9, 1]


def test_a_subset_of_such_a_data_set_is_asked_for_whole_batches_too():
    subset = Subset(Subset(Whole(), [5, 6, 7]), [2, 1])
    assert Reader(subset, rank=0).__getitems__([0, 1]) == [49, 36]


def test_a_subset_of_anything_else_is_read_one_by_one_so_that_errors_name_the_sample():
    subset = Subset(Failing(ValueError("no")), [0, 2])
    with pytest.raises(RuntimeError, match=r"^sample 1 could not be read"):
        Reader(subset, rank=0).__getitems__([0, 1])


@pytest.mark.parametrize(
    ("dataset", "vectorised"),
    [
        (Whole(), True),
        (TensorDataset(torch.ones(2)), True),
        (Subset(TensorDataset(torch.ones(2)), [0]), True),
        (Subset(Subset(Whole(), [0]), [0]), True),
        ([1, 2], False),
        (Subset([1, 2], [0]), False),
        (ConcatDataset([[1], [2]]), False),
    ],
)
def test_what_counts_as_reading_whole_batches(dataset, vectorised):
    assert is_vectorised(dataset) is vectorised


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("torn file"), "ValueError: torn file"),
        (KeyError("label"), "KeyError: 'label'"),
        (Named(7, "lost"), "Named: 7: lost"),
        (StopIteration("early"), "StopIteration: early"),
    ],
)
def test_an_error_names_the_sample_and_the_rank_and_has_its_cause(error, text):
    with pytest.raises(RuntimeError) as caught:
        Reader(Failing(error), rank=3).__getitems__([0, 1, 2])
    assert str(caught.value) == f"sample 2 could not be read on rank 3: {text}"
    assert caught.value.__cause__ is error


def test_an_error_in_a_whole_batch_names_its_samples():
    subset = Subset(Whole(), [1])
    with pytest.raises(RuntimeError, match=r"^samples \[0, 4\] could not be read on rank 1: Index"):
        Reader(subset, rank=1).__getitems__([0, 4])


def test_an_interrupt_is_no_error_of_the_sample():
    with pytest.raises(KeyboardInterrupt):
        Reader(Failing(KeyboardInterrupt()), rank=0).__getitems__([2])


def test_the_attributes_of_the_data_set_are_seen_through_the_reader():
    reader = Reader(Whole(), rank=0)
    assert reader.name == "squares"
    assert len(reader.dataset) == 10
    with pytest.raises(AttributeError, match="colour"):
        _ = reader.colour


def test_a_reader_pickles_for_workers_that_are_spawned():
    assert pickle.loads(pickle.dumps(Reader([4, 5], rank=0))).__getitems__([1]) == [5]
