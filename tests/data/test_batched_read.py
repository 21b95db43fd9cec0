"""Whole batches in one operation: the same as sample by sample, and no sample is asked for."""

import numpy as np
import pytest
import torch
from alike import equal
from common_data import loader_of
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate

from pardata.data._batched_read import batch_reader


def tensors(length, start=0):
    """Return a dataset of several kinds of fields, whose samples can be told apart."""
    numbers = torch.arange(start, start + length)
    halves = (numbers[:, None] * torch.ones(2, 3)[:, None].flatten()).half()
    return TensorDataset(numbers, halves, numbers % 2 == 0)


class OwnItem(TensorDataset):
    def __getitem__(self, index):
        return [tensor + 1 for tensor in super().__getitem__(index)]


class OwnItems(TensorDataset):
    def __getitems__(self, indices):
        return [self[index] for index in reversed(indices)]


class OwnSubset(Subset):
    def __getitem__(self, index):
        return -super().__getitem__(index)[0]

    def __getitems__(self, indices):  # PyTorch insists
        return [self[index] for index in indices]


def read(dataset, indices):
    """Return the one batch of these samples."""
    (batch,) = loader_of(dataset, len(indices), sampler=indices, device=None)
    return batch


def assert_read_as_collated(dataset, indices):
    assert batch_reader(dataset) is not None
    assert equal(read(dataset, indices), default_collate([dataset[index] for index in indices]))


# --- the same as sample by sample ---

nested = st.recursive(
    st.builds(tensors, st.integers(1, 5), st.integers(0, 1000)),
    lambda inner: inner.flatmap(
        lambda dataset: st.lists(
            st.integers(-len(dataset), len(dataset) - 1), min_size=1, max_size=6
        ).map(lambda indices: Subset(dataset, indices))
    ),
    max_leaves=6,
)


@given(st.data(), nested)
def test_a_batch_is_what_default_collate_makes_of_its_samples(data, dataset):
    places = st.integers(-len(dataset), len(dataset) - 1)
    assert_read_as_collated(dataset, data.draw(st.lists(places, min_size=1, max_size=12)))


@pytest.mark.parametrize("indices", [(2, 0), range(2, -1, -2), torch.tensor([2, 0]), np.array([2])])
def test_a_subset_may_have_its_indices_in_any_form(indices):
    assert (
        read(Subset(TensorDataset(torch.arange(3) * 10), indices), [0, 0])[0].tolist() == [20] * 2
    )


def test_a_batch_is_a_copy():
    data = TensorDataset(torch.zeros(3))
    read(data, [0, 1, 2])[0].fill_(1)
    assert data.tensors[0].tolist() == [0, 0, 0]


# --- which datasets ---


OF_SUBCLASSES = [
    (OwnItem(torch.arange(4)), [1, 2]),
    (OwnItems(torch.arange(4)), [1, 0]),
    (OwnSubset(TensorDataset(torch.arange(4)), [3, 1]), [-3, -1]),
    (ConcatDataset([OwnItem(torch.arange(1)), TensorDataset(torch.arange(1))]), [1, 0]),
]


@pytest.mark.parametrize(("dataset", "first"), OF_SUBCLASSES)
def test_what_a_subclass_does_itself_is_done(dataset, first):
    found = next(iter(loader_of(dataset, 2)))
    assert (found if isinstance(found, torch.Tensor) else found[0]).tolist() == first


class Together(Subset):
    """Reads many samples by its own method alone."""

    def __getitem__(self, index):
        raise AssertionError

    def __getitems__(self, indices):
        return [self.dataset[self.indices[index]] for index in indices]


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}], ids=["share", "microbatches"])
def test_a_batch_is_one_call_of_the_getitems_of_a_subclass(options):
    batches = list(loader_of(Together(range(8), range(8)), 4, num_workers=0, **options))
    assert [len(batch) for batch in batches] == [2, 2] if options else [4, 4]


# --- no sample is asked for ---


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 2}], ids=["share", "microbatches"])
def test_an_epoch_reads_no_single_sample_and_collates_none(monkeypatch, options):
    def refuse(*_):
        raise AssertionError

    for kind in (TensorDataset, Subset):
        monkeypatch.setattr(kind, "__getitem__", refuse)
    monkeypatch.setattr(Subset, "__getitems__", refuse)
    monkeypatch.setattr("pardata.data._fetcher.default_collate", None)
    data = Subset(Subset(tensors(13), [0, 1, 2, 3, 10, 12, 11, 9]), range(7))
    seen = []
    for batch in loader_of(data, 5, shuffle=True, drop_last=False, **options):
        for numbers, *_ in batch if options else [batch]:
            seen += numbers.tolist()
    assert sorted(seen) == [0, 1, 2, 3, 10, 11, 12]


# --- out of range ---


OUT_OF_RANGE = [
    (Subset(tensors(3), [0, 3]), [0, 1], "index 3 is out of bounds"),
    (ConcatDataset([tensors(3), tensors(2)]), [0, -6], "index should not exceed dataset length"),
]


@pytest.mark.parametrize(("dataset", "indices", "text"), OUT_OF_RANGE)
def test_an_index_out_of_range_is_an_error_and_no_other_sample(dataset, indices, text):
    with pytest.raises(RuntimeError, match=text):
        read(dataset, indices)


def test_a_worker_that_is_spawned_reads_whole_batches_too():
    whole = TensorDataset(torch.arange(6))
    nested_sets = Subset(Subset(whole, [5, 1, 4, 3]), [0, 1, 3])
    options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    ((batch,),) = loader_of(nested_sets, 3, **options)
    assert batch.tolist() == [5, 1, 3]
