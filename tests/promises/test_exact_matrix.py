"""One fingerprint per model and optimizer, at any size, with any workers, interrupted or not.

``PYTHONPATH=tests python tests/promises/test_exact_matrix.py`` prints the table.
"""

import functools
import itertools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from on_ranks import run
from torch import nn
from torch.utils.data import Dataset

from pardata import backward, fingerprint, make_loader, world, wrap_model

SIZES = [1, 2, 3, 4]
WORKERS = [0, 2]


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Dropout2d(0.2), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10)),
        )

    def forward(self, images):
        return self.layers(images)


class Block(nn.Module):
    """That of a ResNet-18: two convolutions with batch norm, and a way around them."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(3))
        self.around = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, images):
        hidden = torch.relu(self.norms[0](self.first(images)))
        hidden = self.norms[1](self.second(hidden))
        return torch.relu(hidden + self.norms[2](self.around(images)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(1, 8, 1), Block(8, 12, 2))
        self.last = nn.Linear(12, 10)

    def forward(self, images):
        return self.last(self.blocks(images).mean((2, 3)))


class Transformer(nn.Module):
    """With dropout, layer norm, and a table of words that is both its first and its last layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.2, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.words = nn.Linear(16, 40, bias=False)
        self.words.weight = self.table.weight

    def forward(self, words):
        return self.words(self.norm(self.layer(self.table(words))))


class Rows(nn.Module):
    """A large table of which a batch uses a few rows."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(3000, 8, mode="mean")
        self.last = nn.Linear(8, 10)

    def forward(self, words):
        return self.last(self.table(words))


class Images(Dataset):
    """Augmented at random, by every generator there is."""

    def __init__(self, count=62):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        image = torch.sin(torch.arange(144.0).view(1, 12, 12) * (index + 1))
        return image + 0.1 * torch.randn(1, 12, 12), index % 10


class Words(Images):
    def __getitem__(self, index):
        words = (torch.arange(9) * (index + 3) + torch.randint(3, (9,))) % 40
        return words, (words + 1) % 40


class Bags(Images):
    def __getitem__(self, index):
        return (torch.arange(5) * 37 * (index + 1) + torch.randint(9, (5,))) % 3000, index % 10


MODELS = {
    "ConvNet": (ConvNet, Images),
    "ResNet": (ResNet, Images),
    "transformer": (Transformer, Words),
    "embedding": (Rows, Bags),
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}
ROWS = list(itertools.product(MODELS, OPTIMIZERS))


class Training:
    """One model under every optimizer at once, on the batches of one loader, to save time."""

    def __init__(self, name, workers):
        kind, data = MODELS[name]
        # Microbatches of 4: of a step of 22 samples the last is short, and the last step is too.
        self.loader = make_loader(
            data(),
            22,
            shuffle=True,
            drop_last=False,
            microbatch_size=4,
            seed=7,
            num_workers=workers,
        )
        self.models, self.optimizers = {}, {}
        for optimizer, kind_of_it in OPTIMIZERS.items():
            torch.manual_seed(world().rank)  # rank 0's weights are everybody's
            self.models[optimizer] = wrap_model(kind(), "exact")
            self.optimizers[optimizer] = kind_of_it(self.models[optimizer].parameters())

    def run(self, epochs, stop_after=None):
        """Return the losses of each step; stop in the middle of an epoch if told so."""
        losses = []
        for _ in range(self.loader.epoch, epochs):
            for batch in self.loader:
                losses.append({name: self.step(name, batch) for name in OPTIMIZERS})
                if len(losses) == stop_after:
                    return losses
        return losses

    def step(self, name, batch):
        self.optimizers[name].zero_grad()
        loss = backward(self.models[name], loss_fn, batch)
        self.optimizers[name].step()
        return loss.item()

    def fingerprints(self):
        return {name: fingerprint(model) for name, model in self.models.items()}

    def parts(self):
        return [self.loader, *self.models.values(), *self.optimizers.values()]

    def save(self, path):
        if world().rank == 0:
            torch.save([part.state_dict() for part in self.parts()], path)

    def load(self, path):
        for part, state in zip(self.parts(), torch.load(path), strict=True):
            part.load_state_dict(state)


def loss_fn(model, batch):
    inputs, targets = batch
    output = model(inputs)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


EPOCHS, STOPS = 2, [2, 2, None]  # of the six steps: two, then two across epochs, then the rest
WENT_ON = [4, 2, 3]  # processes


def undisturbed(workers):
    """Return the losses and fingerprints of every model."""
    told = {}
    for name in MODELS:
        training = Training(name, workers)
        told[name] = training.run(EPOCHS), training.fingerprints()
    return told


def part_of(number, folder):
    """Run one part of an interrupted run of every model; return likewise."""
    told = {}
    for name in MODELS:
        training = Training(name, 0)
        if number:
            training.load(Path(folder) / f"{name}-{number - 1}.pt")
        told[name] = training.run(EPOCHS, STOPS[number]), training.fingerprints()
        training.save(Path(folder) / f"{name}-{number}.pt")
    return told


@functools.cache
def told_at(size, workers):
    return run(undisturbed, workers, world_size=size, timeout=250)


@functools.cache
def told_interrupted():
    with tempfile.TemporaryDirectory() as folder:
        return [
            run(part_of, number, folder, world_size=size, timeout=250)
            for number, size in enumerate(WENT_ON)
        ]


def of_row(row, told):
    """Return the losses of a row and its fingerprint."""
    name, optimizer = row
    losses, fingerprints = told[name]
    return [step[optimizer] for step in losses], fingerprints[optimizer]


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_a_row_has_one_fingerprint_and_the_same_losses(row):
    reference = of_row(row, told_at(1, 0)[0])
    assert len(reference[0]) == 6
    for size, workers in itertools.product(SIZES, WORKERS):
        for rank, told in enumerate(told_at(size, workers)):
            assert of_row(row, told) == reference, (size, workers, rank)


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_an_interrupted_run_that_goes_on_at_other_sizes_is_the_same_run(row):
    losses, expected = of_row(row, told_at(1, 0)[0])
    parts = [[of_row(row, told) for told in ranks] for ranks in told_interrupted()]
    assert all(told == ranks[0] for ranks in parts for told in ranks)
    assert [len(ranks[0][0]) for ranks in parts] == [2, 2, 2]
    assert [loss for ranks in parts for loss in ranks[0][0]] == losses
    assert parts[-1][0][1] == expected


def test_models_and_optimizers_differ():
    prints = {of_row(row, told_at(1, 0)[0])[1] for row in ROWS}
    # AdamW's two implementations may agree to the last bit.
    assert len(prints) >= len(ROWS) - len(MODELS)


def print_table():
    ways = list(itertools.product(SIZES, WORKERS))
    heads = [f"{size} p., {workers} w." for size, workers in ways]
    print(f"| model | optimizer | {' | '.join(heads)} | {', then '.join(map(str, WENT_ON))} p. |")
    print("| --- " * (len(heads) + 3) + "|")
    for row in ROWS:
        found = [of_row(row, told_at(*way)[0])[1] for way in ways]
        found.append(of_row(row, told_interrupted()[-1][0])[1])
        print(f"| {' | '.join([*row, *(fingerprint[:8] for fingerprint in found)])} |")


if __name__ == "__main__":
    print_table()
