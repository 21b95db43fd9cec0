"""What a dataset lists is compared between ranks: files, indices, labels, numbers of classes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common_data import Numbers
from on_ranks import run_caught
from torch.utils.data import TensorDataset

from pardata import make_loader, world

NAMES = ["cat", "dog", "owl"]


def holding(**attributes):
    data = Numbers(6)
    vars(data).update(attributes)
    return data


class Closed:
    """As an array in a file that is closed: to ask it for anything raises."""

    @property
    def ndim(self):
        raise ValueError


def labels(rank):
    """Return labels that another order of a set gives on rank 1."""
    kinds = NAMES[:: 1 - 2 * rank]
    return [kinds.index(NAMES[i % 3]) for i in range(6)]


DIFFERENT = {
    "a list": lambda rank: [(float(i), label) for i, label in enumerate(labels(rank))],
    "labels": lambda rank: holding(labels=labels(rank)),
    "an array": lambda rank: holding(targets=np.array(labels(rank))),
    "a tensor": lambda rank: TensorDataset(torch.zeros(6, 2), torch.tensor(labels(rank))),
    "files": lambda rank: holding(samples=[(f"/{rank}/a", n) for n in labels(rank)]),
    "classes": lambda rank: holding(class_to_idx={n: i for i, n in enumerate(NAMES[rank:])}),
    "order": lambda rank: holding(index=dict(zip(NAMES, labels(rank), strict=False))),
}
ALIKE = {
    "paths of nodes": lambda rank: holding(files=[f"/node-{rank}/{n}" for n in range(6)]),
    "settings": lambda rank: holding(settings={"rank": rank, "size": 2}, at=rank),
    "caches": lambda rank: holding(seen=[None] * 3 + [rank] * 3, kept=[torch.ones(rank)] * 6),
    "floats": lambda rank: holding(losses=torch.full((6,), float(rank))),
    "one name": lambda rank: holding(one={f"rank {rank}": 0}),
    "a closed file": lambda rank: holding(file=Closed(), add=np.add),
    "an object": lambda rank: holding(inner=SimpleNamespace(labels=labels(rank))),
}


def _loaded(kind):
    make_loader({**DIFFERENT, **ALIKE}[kind](world().rank), 2, num_workers=0)


@pytest.mark.parametrize("kind", DIFFERENT)
def test_ranks_whose_datasets_list_something_else_are_told(kind):
    for raised in run_caught(_loaded, kind, world_size=2):
        assert raised.type == "RuntimeError"
        assert "but `the listed samples` differs" in raised.text


@pytest.mark.parametrize("kind", ALIKE)
def test_datasets_may_differ_in_anything_else(kind):
    assert run_caught(_loaded, kind, world_size=2) == [None, None]
