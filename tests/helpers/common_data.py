"""Datasets and samplers, and how to read loaders, for the tests of loading."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from pardata import Microbatches, make_loader


class Numbers(Dataset):
    """Each sample is its number; counts how many were read."""

    def __init__(self, length=7):
        self.length, self.read = length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read += 1
        return index


class Drawing(Numbers):
    """Draws from all three default generators, as augmentations do."""

    def __init__(self, length=13):
        super().__init__(length)

    def __getitem__(self, index):
        return index + random.random() + np.random.rand() + torch.rand(()).item()  # noqa: NPY002  # as users do


class Count(IterableDataset):
    """A stream of numbers."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Sized(Count):
    def __len__(self):
        return self.length


class Buffer(Count):
    """Shuffles through a buffer and augments: draws from all three default generators."""

    def __iter__(self):
        buffer = [random.random() for _ in range(3)]  # at the start, and before the first sample
        for number in range(self.length):
            buffer.append(number + float(np.random.rand()))  # noqa: NPY002  # the one that users draw from
            yield buffer.pop(random.randrange(len(buffer))) + torch.rand(()).item()
        yield from buffer


class Permuted(Buffer):
    """Draws when it is asked for an iterator, before any sample."""

    def __iter__(self):
        return iter(random.sample(range(self.length), self.length))


class ByLength(Sampler):
    """Batches of samples of like length, of unlike numbers, in another order each epoch."""

    def __init__(self, length, tokens):
        self.lengths = [1 + 7 * i % 5 for i in range(length)]
        self.tokens, self.epoch = tokens, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        batches, batch = [], []
        for index in sorted(range(len(self.lengths)), key=lambda i: (self.lengths[i], i)):
            if batch and self.lengths[index] * (len(batch) + 1) > self.tokens:
                batches, batch = [*batches, batch], []
            batch.append(index)
        batches.append(batch)
        return iter([batches[i] for i in torch.randperm(len(batches))] + batches[: self.epoch])


class Rotated(Sampler):
    """Knows its epoch, as a DistributedSampler does, and which it was told."""

    def __init__(self, length):
        self.length, self.told = length, []

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        self.told.append(epoch)

    def __iter__(self):
        return iter([(i + self.told[-1]) % self.length for i in range(self.length)])


class TwoArguments(Exception):  # noqa: N818  # a user's own
    """Cannot be made again from its text, as a worker's errors are."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")


# What a dataset raises, and how an error tells of it.
ERRORS = {
    "ValueError: torn file": ValueError("torn file"),
    "KeyError: 'label'": KeyError("label"),
    "TwoArguments: 7: lost": TwoArguments(7, "lost"),
}


def loader_of(data=23, batch_size=5, **options):
    data = Numbers(data) if isinstance(data, int) else data
    return make_loader(data, batch_size, **{"num_workers": 0, "seed": 1, **options})


def rows(batch):
    """Return what a batch holds, so that those of all ranks, one after another, are the step."""
    if isinstance(batch, Microbatches):
        return [part.tolist() for part in batch]
    return (batch[0] if isinstance(batch, list) else batch).tolist()


def steps(loader):
    return [rows(batch) for batch in loader]


def flat(lists):
    return [item for part in lists for item in part]


def joined(ranks):
    """Return the steps that the ranks' shares make up."""
    assert len({len(found) for found in ranks}) == 1
    return [flat(shares) for shares in zip(*ranks, strict=True)]


def place(loader):
    state = loader.state_dict()
    return state["epoch"], state["delivered"]


def at(loader, epoch, delivered=0):
    """Return the loader, to go on there."""
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "delivered": delivered})
    return loader


def states():
    """Return where the generators of this process are."""
    return str(random.getstate()), str(np.random.get_state()), str(torch.get_rng_state().tolist())  # noqa: NPY002  # the one that could be changed
