"""Reading a step: by whole batches where the data set can, collated, and errors name the sample."""

import pickle

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from pardata.data._reader import Fetched, Reader, Request, Seeds, StandsForDataset


class Whole(Dataset):
    """Indexed by whole batches."""

    name = "squares"

    def __len__(self):
        return 10

    def __getitem__(self, index):
        raise AssertionError

    def __getitems__(self, indices):
        return [index**2 for index in indices]


class Collated(Whole):
    """Returns a batch and no list of samples."""

    def __init__(self, form):
        self.form = form

    def __getitems__(self, indices):
        return self.form(indices)


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


def reader(dataset, collate_fn=list, *, rank=0, reproducible=True):
    """Return a reader that hands over lists of samples, unless it is to collate."""
    return Reader(dataset, collate_fn, Seeds(0, reproducible, False), rank)


def request(*parts, epoch=0, step=0, first=0):
    counts = tuple(map(len, parts))
    return Request(epoch, step, first, list(parts), counts, sum(counts))


def read(dataset, *parts, collate_fn=list, **options):
    """Return the batch of each part."""
    return reader(dataset, collate_fn, **options)[request(*parts)].parts


# --- samples ---


def test_samples_come_in_the_order_asked_for():
    assert read("abc", [2, 0, 2]) == [["c", "a", "c"]]


def test_each_part_is_a_batch_of_its_own():
    assert read("abcd", [1, 0], [3], [2, 2]) == [["b", "a"], ["d"], ["c", "c"]]
    assert read("abcd") == []


def test_indices_that_come_as_a_tensor_are_plain_numbers_to_the_data_set():
    # As a list's are, and as those that a sampler yields.
    data = {0: "zero", 1: "one"}
    assert read(data, torch.tensor([1, 0])) == [["one", "zero"]]
    ((first,),) = read(range(5), torch.tensor([3]))
    assert type(first) is int


def test_what_was_read_says_of_which_step_it_is():
    asked = Request(3, 7, 2, [[0], [1, 2]], (2, 2, 1, 2), 3)
    assert reader("abc")[asked] == Fetched(3, 7, 2, [["a"], ["b", "c"]], (2, 2, 1, 2), 3)


def test_without_a_collate_fn_samples_are_collated_as_by_dataloader():
    (batch,) = read([(1, "a"), (2, "b")], [1, 0], collate_fn=None)
    assert [batch[0].tolist(), batch[1]] == [[2, 1], ("b", "a")]


def test_a_collate_fn_is_given_the_samples_of_one_part():
    assert read(range(10), [3, 1], [5], collate_fn=sum) == [4, 5]
    assert read(TensorDataset(torch.arange(4)), [3, 1], collate_fn=len) == [2]


# --- whole batches ---


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_data_set_that_reads_whole_batches_is_asked_for_them(reproducible):
    assert read(Whole(), [3, 1], [2], reproducible=reproducible) == [[9, 1], [4]]
    (batch,) = read(Whole(), [3, 1], collate_fn=None, reproducible=reproducible)
    assert batch.tolist() == [9, 1]


def test_a_subset_of_such_a_data_set_is_asked_for_whole_batches_too():
    subset = Subset(Subset(Whole(), [5, 6, 7]), [2, 1])
    assert read(subset, [0, 1]) == [[49, 36]]


def test_the_samples_of_a_whole_batch_are_collated_and_a_batch_is_taken_as_it_is():
    numbers = Collated(lambda indices: [(index, index / 2) for index in indices])
    assert [part.tolist() for part in read(numbers, [4, 2], collate_fn=None)[0]] == [[4, 2], [2, 1]]
    (batch,) = read(Collated(torch.tensor), [4, 2], collate_fn=None)
    assert batch.tolist() == [4, 2]
    for form in (lambda indices: {"x": indices}, lambda indices: (indices, len(indices))):
        (batch,) = read(Collated(form), [4, 2], collate_fn=None)
        assert batch == form([4, 2])
    # A collate_fn has the last word.
    assert read(Collated(tuple), [4, 2], collate_fn=sum) == [6]


def test_what_can_be_indexed_at_once_is_and_needs_no_collating():
    data = TensorDataset(torch.arange(10), torch.arange(10.0))
    several = Subset(ConcatDataset([data, data]), range(19))
    for dataset in (data, several):
        ((x, y),) = read(dataset, [7, 2], collate_fn=None)
        assert (x.tolist(), y.tolist()) == ([7, 2], [7.0, 2.0])


def test_a_subset_of_anything_else_is_read_one_by_one_so_that_errors_name_the_sample():
    subset = Subset(Failing(ValueError("no")), [0, 2])
    for collate_fn in (list, None):
        with pytest.raises(RuntimeError, match=r"^sample 1 could not be read"):
            read(subset, [0, 1], collate_fn=collate_fn)


# --- errors ---


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
        read(Failing(error), [0, 1, 2], rank=3)
    assert str(caught.value) == f"sample 2 could not be read on rank 3: {text}"
    assert caught.value.__cause__ is error


def test_an_error_in_a_whole_batch_names_its_samples():
    with pytest.raises(RuntimeError, match=r"^samples \[0, 4\] could not be read on rank 1: Index"):
        read(Subset(Whole(), [1]), [0, 4], rank=1)
    data = TensorDataset(torch.arange(3))
    for indices in ([0, 4], torch.tensor([0, 4])):
        with pytest.raises(RuntimeError, match=r"^samples \[0, 4\] could .* rank 1: IndexError"):
            read(data, indices, rank=1, collate_fn=None)


def test_an_error_in_collating_is_left_as_it_is():
    def broken(samples):
        raise LookupError(samples)

    with pytest.raises(LookupError, match=r"\[0, 1\]"):
        read(range(3), [0, 1], collate_fn=broken)


def test_an_interrupt_is_no_error_of_the_sample():
    with pytest.raises(KeyboardInterrupt):
        read(Failing(KeyboardInterrupt()), [2])


# --- as a worker sees it ---


def test_the_attributes_of_the_data_set_are_seen_and_set_through_the_reader():
    data = Whole()
    through = reader(data)
    assert isinstance(through, StandsForDataset)
    assert through.name == "squares"
    assert len(through.dataset) == 10
    with pytest.raises(AttributeError, match="colour"):
        _ = through.colour
    through.colour = "red"
    assert data.colour == through.colour == "red"


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_reader_pickles_for_workers_that_are_spawned(reproducible):
    there = pickle.loads(pickle.dumps(reader([4, 5], reproducible=reproducible)))
    assert there[request([1])].parts == [[5]]
