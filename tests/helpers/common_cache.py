"""Datasets that count their readings, and how to compare them, for the tests of caching."""

import random
from collections import namedtuple
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

NOT_LOOKED_AT = 4  # of 10 samples: not among the 8 by which a change is noticed
LOOKS = 17  # readings of the source where nothing is built: 8 samples twice, and the first

Point = namedtuple("Point", ["x", "name"])  # noqa: PYI024  # the untyped kind must work too


class Samples(Dataset):
    """Makes its samples by a function of the index, and counts how often it is asked."""

    def __init__(self, make, length=10, transform=None):
        self.make, self.length, self.transform = make, length, transform
        self.reads = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.reads.append(index)
        sample = self.make(index)
        return sample if self.transform is None else self.transform(sample)


def pair(index):
    return torch.full((2, 3), float(index)), index


def drawing(index):
    drawn = random.random() + np.random.rand()  # noqa: NPY002  # as users do
    return torch.rand(3) + drawn + index


def at(index, odd, usual=pair):
    return lambda i: odd(i) if i == index else usual(i)


def unreadable(index):
    raise ValueError(f"bad pixel {index}")


def contents(directory):
    """Return the files of a cache, without the lock."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(Path(directory).rglob("*"))
        if path.is_file() and path.name != "pardata-lock"
    }
