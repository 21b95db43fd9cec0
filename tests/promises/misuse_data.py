"""What the rows of ``errors.md`` use that read data."""

import itertools
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

from pardata import Mixture, cache_dataset, make_loader

TEN = data = TensorDataset(torch.arange(10))
a_file = __file__


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Once(IterableDataset):
    """Hands out one iterator, which is used up after an epoch."""

    def __init__(self):
        self.samples = iter(range(10))

    def __iter__(self):
        return self.samples


def twice(dataset):
    loader = make_loader(dataset, 5, num_workers=0)
    return [list(loader) for _ in range(2)]


class Broken(Dataset):
    """The seventh of its ten samples cannot be read."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 7:
            raise OSError("the file is truncated")
        return index


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


class OfItself(NoLength):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


class Longer:
    """A sampler that yields more than it says."""

    def __len__(self):
        return 5

    def __iter__(self):
        return iter(range(9))


class Endless(Longer):
    """A sampler that never ends."""

    def __iter__(self):
        return itertools.repeat(0)


def go_on(**changes):
    """Let a loader of a stream of ten go on from its state, with some keys changed."""
    loader = make_loader(Stream(), 5, seed=1, num_workers=0)
    loader.load_state_dict({**loader.state_dict(), **changes})
    list(loader)


def own_generator():
    return RandomSampler(TEN, generator=torch.Generator().manual_seed(0))


def load(**changes):
    """Load the state of a loader that stands at the beginning, with some keys changed."""
    loader = make_loader(TEN, 4, seed=1)
    state = {**loader.state_dict(), **changes}
    loader.load_state_dict({key: value for key, value in state.items() if value != "none"})


def cache(dataset, **options):
    with tempfile.TemporaryDirectory() as directory:
        cache_dataset(dataset, directory, **options)


def epoch_of(*args, **options):
    return list(make_loader(*args, **options))


def grown():
    """Read an epoch of a list that has grown since its loader was made."""
    data = [0, 1, 2, 3]
    loader = make_loader(data, 3, num_workers=0)
    data.append(4)
    list(loader)


class Shrinking:
    """A sampler that is shorter in each epoch."""

    length = 4

    def set_epoch(self, epoch):
        self.length = 4 - epoch

    def __iter__(self):
        return iter(range(self.length))


def shrunk():
    loader = make_loader(TEN, 4, sampler=Shrinking(), drop_last=True, num_workers=0)
    list(loader)
    list(loader)


def reads_a_file():
    """Read, in workers, a dataset that has opened its file before they are forked."""
    with Path(__file__).open() as file:
        data = OfItself(10)
        data.file = file
        make_loader(data, 4, num_workers=1)


def listed(*files):
    data = OfItself(len(files))
    data.files = [f"data/{file}" for file in files]
    return data


def mixed(weight):
    return Mixture({"a": (TEN, 1), "b": (TEN, weight)})


def part(first):
    return Subset(TEN, [first, 5, 6, 7])


LABELS = {
    "files in another order on one rank": "make_loader(listed(*('ab' if rank else 'ba')), 4)",
    "a split that another seed draws on one rank": "make_loader(part(rank), 4)",
    "a dataset with an open file, in workers": "reads_a_file()",
    "a dataset that has grown since its loader was made": "grown()",
    "a sampler that shrinks below the batch size": "shrunk()",
    "a map-style dataset without `__len__`": "make_loader(NoLength(), 4)",
    "a dataset whose `__len__` returns 2.5": "make_loader(OfItself(2.5), 4)",
    "a dataset whose `__len__` returns -1": "make_loader(OfItself(-1), 4)",
    "an iterable dataset that can be read once": "twice(Once())",
    "a dataset that is shorter on one rank": "make_loader(OfItself(10 - rank), 4)",
    "an error in `__getitem__`": "epoch_of(Broken(), 10, num_workers=0)",
    "a sampler that yields more than its length": "epoch_of(TEN, 4, sampler=Longer())",
    "a sampler that never ends": "epoch_of(TEN, 4, sampler=Endless())",
    "a sampler with a generator of its own": "epoch_of(TEN, 4, sampler=own_generator())",
    "a seed that only some ranks have": "make_loader(TEN, 4, seed=rank or None)",
    "a state from which a key is gone": "load(seed='none')",
    "an iterable dataset longer than the state says": "go_on(delivered=7)",
    "an iterable dataset shorter than the state says": "go_on(delivered=100)",
    "an iterable dataset with randomness of its own, resumed": "go_on(delivered=5, digest='other')",
    "a dataset to be cached that is shorter on one rank": "cache(OfItself(10 - rank))",
}
