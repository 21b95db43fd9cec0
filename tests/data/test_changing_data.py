"""Data that change between epochs: read as they are in each, or an error; never as they were."""

import random

import pytest
import torch
from common_data import Numbers, flat, joined, loader_of, steps
from logged import log_of
from on_ranks import run
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from pardata import make_loader

# --- a length that changes; of a dataset itself: tests/promises/misuse_data.py ---


class Curriculum(Sampler):
    """Has as many samples as its epoch says."""

    def __init__(self, sizes):
        self.sizes, self.epoch = sizes, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.sizes[self.epoch]

    def __iter__(self):
        return iter(range(self.sizes[self.epoch]))


class WithoutLength(Curriculum):
    __len__ = None


def _of_sizes(kind, workers, state=None):
    sizes = [4, 12, 8, 6]
    loader = loader_of(20, 4, sampler=kind(sizes), num_workers=workers, drop_last=False)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for epoch in loader.epochs(4):
        found += [(epoch, batch.tolist(), loader.state_dict()) for batch in loader]
    return found


@pytest.mark.parametrize("kind", [Curriculum, WithoutLength])
def test_a_sampler_sets_each_epochs_length_and_resumes_at_any_size(kind):
    whole = _of_sizes(kind, 0)
    shown = [(epoch, numbers) for epoch, numbers, _ in whole]
    of_first = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    steps_of = [of_first[:1], of_first, of_first[:2], [[0, 1, 2, 3], [4, 5]]]
    assert shown == [(epoch, step) for epoch, found in enumerate(steps_of) for step in found]
    for size, workers, begun in [(2, 0, 0), (2, 2, 2), (1, 1, 5)]:
        ranks = run(_of_sizes, kind, workers, whole[begun][2], world_size=size)
        rest = joined([[numbers for _, numbers, _ in found] for found in ranks])
        assert rest == [numbers for _, numbers in shown[begun + 1 :]]


def _lengths():
    loader = loader_of(20, 4, sampler=Curriculum([4, 12, 9]), drop_last=False)
    return [len(loader), *((steps(loader), len(loader))[1] for _ in range(3))]


def test_the_length_of_a_loader_is_that_of_its_sampler_now():
    assert _lengths() == [1, 1, 3, 3]
    loader = loader_of(9, 3, sampler=WithoutLength([9]))
    with pytest.raises(
        TypeError, match="the sampler must have a __len__, but WithoutLength has none"
    ):
        len(loader)
    assert steps(loader) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def _tail():
    loader = loader_of(20, 4, sampler=Curriculum([8, 9]), drop_last=False)
    return [steps(loader) for _ in range(2)]


def test_the_tail_of_an_epoch_may_leave_ranks_without_samples():
    first = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert _tail() == [first, [*first, [8]]]
    epochs = zip(*run(_tail, world_size=2), strict=True)
    assert [joined(epoch) for epoch in epochs] == [first, [*first, [8]]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_buffer_that_grows_is_read_whole_through_a_sampler_of_it(workers):
    buffer = [0, 1, 2, 3]
    loader = loader_of(buffer, 2, sampler=RandomSampler(buffer), num_workers=workers)
    seen = []
    for _ in range(3):
        seen.append(sorted(flat(steps(loader))))
        buffer += [len(buffer), len(buffer) + 1]
    assert seen == [[*range(4)], [*range(6)], [*range(8)]]


# --- lists that each rank fills by itself ---


class Caching(Dataset):
    """Keeps what it has read, as text, in a list that has a place for each sample."""

    def __init__(self):
        self.read = [None] * 10

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.read[index] = f"sample {index}"
        return index


def _reads_twice():
    data = Caching()
    return [sum(map(len, steps(loader_of(data, 5, num_workers=0)))) for _ in range(2)]


def test_a_cache_that_each_rank_fills_by_itself_is_no_difference():
    assert [sum(found) for found in zip(*run(_reads_twice, world_size=2), strict=True)] == [10, 10]


# --- other samples in the same places ---


def _reassigned(make, workers):
    subset = make()
    loader = loader_of(subset, 2, num_workers=workers)
    found = [flat(steps(loader))]
    inner = subset.datasets[0] if isinstance(subset, ConcatDataset) else subset
    inner.indices = [4, 5, 6]
    found.append(flat(steps(loader)))
    inner.indices[:] = [7, 8, 9]
    found.append(flat(steps(loader)))
    return found


SUBSETS = {
    "of tensors": lambda: Subset(TensorDataset(torch.arange(10)), [0, 1, 2]),
    "of samples": lambda: Subset(range(10), [0, 1, 2]),
    "inside": lambda: ConcatDataset([Subset(TensorDataset(torch.arange(10)), [0, 1, 2])]),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", SUBSETS.values(), ids=SUBSETS)
def test_the_indices_of_a_subset_are_read_as_they_are(make, workers):
    assert _reassigned(make, workers) == [[0, 1, 2], [4, 5, 6], [7, 8, 9]]


class Scaled(Numbers):
    def __init__(self, length):
        super().__init__(length)
        self.factor = [1]

    def __getitem__(self, index):
        return index * self.factor[0]


class ScaledStream(IterableDataset):
    def __init__(self):
        self.factor = [1]

    def __iter__(self):
        return iter([number * self.factor[0] for number in range(4)])


@pytest.mark.parametrize(("workers", "persists"), [(0, None), (2, None), (2, True)])
@pytest.mark.parametrize("kind", [lambda: Scaled(4), ScaledStream])
def test_new_workers_read_the_dataset_anew_and_persistent_ones_do_not(kind, workers, persists):
    data = kind()
    loader = loader_of(data, 4, num_workers=workers, persistent_workers=persists)
    found = [steps(loader)]
    data.factor[0] = 10  # inside an attribute, as that of a transform
    changed = [[0, 1, 2, 3]] if persists else [[0, 10, 20, 30]]
    assert [*found, steps(loader)] == [[[0, 1, 2, 3]], changed]


class OpensOnce(Numbers):
    file = None

    def __getitem__(self, index):
        self.file = self.file or open(__file__)  # noqa: PTH123, SIM115  # as a reader of HDF5
        return index


def test_a_file_opened_between_epochs_is_an_error_before_workers_are_forked():
    data = OpensOnce(4)
    loader = loader_of(data, 2, num_workers=1, multiprocessing_context="fork")
    assert steps(loader) == [[0, 1], [2, 3]]
    assert data[0] == 0  # opens it in this process
    with data.file, pytest.raises(ValueError, match=r"`dataset\.file` must be closed when"):
        steps(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_that_are_assigned_are_read(workers):
    data = TensorDataset(torch.arange(3))
    loader = loader_of(data, 3, num_workers=workers)
    found = [steps(loader)]
    data.tensors = (torch.arange(3) + 5,)
    assert [*found, steps(loader)] == [[[0, 1, 2]], [[5, 6, 7]]]


def test_a_changed_sampler_does_not_change_the_delivered_fingerprint():
    sampler = WeightedRandomSampler([1.0] * 9, 9)
    loader = loader_of(9, 3, sampler=sampler)
    steps(loader)
    before = loader.fingerprint()
    sampler.weights = torch.tensor([0.0] * 8 + [1.0])  # as one that follows the losses
    assert loader.fingerprint() == before
    assert steps(loader) == [[8, 8, 8]] * 3


# --- samplers as others write them ---


class Shuffles(Sampler):
    """Shuffles a copy of its groups, and has no length, as torchvision's PKSampler."""

    def __iter__(self):
        groups = [[*range(5)], [*range(5, 10)]]
        for group in groups:
            random.shuffle(group)
        return iter([index for pair in zip(*groups, strict=True) for index in pair])


@pytest.mark.parametrize("size", [1, 2])
def test_a_sampler_needs_no_length_also_inside_a_batch_sampler(size):
    for options in (
        {"sampler": Shuffles(), "batch_size": 4, "drop_last": False},
        {"batch_sampler": BatchSampler(Shuffles(), 4, drop_last=False), "batch_size": None},
    ):
        for found in run(_epochs_of, options, world_size=size):
            assert [len(epoch) for epoch in found] == [3, 3]
            assert found[0] != found[1]
        whole = joined([epoch[0] for epoch in run(_epochs_of, options, world_size=size)])
        assert sorted(flat(whole)) == [*range(10)]


def _epochs_of(options):
    loader = loader_of(10, **options)
    return [steps(loader) for _ in range(2)]


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield 0


def test_a_sampler_without_a_length_must_end(monkeypatch):
    monkeypatch.setattr("pardata.data._sampler._MOST", 100)
    text = "as many indices as its length, at most 100 without one, not more"
    with pytest.raises(ValueError, match=text):
        next(iter(loader_of(10, 4, sampler=Endless())))


# --- nothing at all ---


def test_an_empty_dataset_is_warned_about():
    with log_of("pardata.data._config") as log:
        assert list(make_loader([], 2, num_workers=0)) == []
    text = "the list is empty, so that its loader has no steps: look at where it reads from"
    assert log.lines == [text]
