"""What a rank says of the samples that it reads at this moment, to who looks for a hang."""

import sys

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from pardata import make_loader
from pardata.data._reading import read_in


class Said:
    """Keeps what is said while it is read."""

    def __init__(self):
        self.said = []

    def __len__(self):
        return 4

    def look(self):
        self.said.append(read_in(sys._getframe(1)))
        return torch.ones(1)


class Single(Said, Dataset):
    def __getitem__(self, index):
        return self.look()


class Many(Single):
    def __getitems__(self, indices):
        return [self.look() for _ in indices]


class Stream(Said, IterableDataset):
    def __iter__(self):
        return (self.look() for _ in range(4))


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        (Single, "reads sample 3 of Single"),
        (Many, "reads samples [2, 3] of Many"),
        (Stream, "reads sample 3 of Stream"),
    ],
)
def test_it_says_which_samples_are_read(kind, last):
    list(make_loader(dataset := kind(), 2, shuffle=False, num_workers=0))
    assert dataset.said[-1] == last


def test_it_says_nothing_elsewhere():
    assert read_in(sys._getframe()) == ""
