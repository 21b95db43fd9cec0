"""One fingerprint per model and optimizer, at any size, with any workers, interrupted or not.

``pytest -m soak`` takes every optimizer and every size with every number of workers, uninterrupted,
and 5 and 8 processes.
"""

import functools
import itertools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from on_ranks import run
from torch import nn, optim
from torch.utils.data import Dataset

from pardata import backward, fingerprint, make_loader, world, wrap_model

SIZES = (1, 2, 3, 4)  # each with 0 and 2 workers of each process


class ResNet(nn.Module):
    """Convolutions with batch norm and a way around them, dropout and pooling."""

    def __init__(self):
        super().__init__()
        self.first, self.around = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(1, 8, 1, 2)
        self.second = nn.Conv2d(8, 8, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.head = nn.Sequential(
            nn.Dropout2d(0.2), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
        )

    def forward(self, images):
        hidden = torch.relu(self.norms[0](self.first(images)))
        return self.head(torch.relu(self.norms[1](self.second(hidden)) + self.around(images)))


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


def bag():
    """Return a large table of which a batch uses a few rows."""
    return nn.Sequential(nn.EmbeddingBag(3000, 8, mode="mean"), nn.Linear(8, 10))


class Recurrent(nn.Module):
    """Two layers of an LSTM with dropout between them, in bfloat16."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.layers = nn.LSTM(16, 16, 2, batch_first=True, dropout=0.2)
        self.words = nn.Linear(16, 40)
        self.bfloat16()

    def forward(self, words):
        return self.words(self.layers(self.table(words))[0]).float()


def compiled():
    """Return a convolutional net in float64, channels last, compiled."""
    net = ResNet().double().to(memory_format=torch.channels_last)
    return nn.Sequential(Doubled(), torch.compile(net, backend="eager", dynamic=False))


class Doubled(nn.Module):
    def forward(self, images):
        return images.double().to(memory_format=torch.channels_last)


def image(index):
    picture = torch.sin(torch.arange(144.0).view(1, 12, 12) * (index + 1))
    return picture + 0.1 * torch.randn(1, 12, 12), index % 10


def sentence(index):
    words = (torch.arange(9) * (index + 3) + torch.randint(3, (9,))) % 40
    return words, (words + 1) % 40


def few(index):
    return (torch.arange(5) * 37 * (index + 1) + torch.randint(9, (5,))) % 3000, index % 10


class Augmented(Dataset):
    """Samples that are drawn anew in each epoch."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 62

    def __getitem__(self, index):
        return self.sample(index)


MODELS = {
    "ResNet": (ResNet, image),
    "transformer": (Transformer, sentence),
    "table": (bag, few),
    "LSTM in bfloat16": (Recurrent, sentence),
    "compiled in float64, channels last": (compiled, image),
}
OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda p: optim.Adam(p, lr=1e-2),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
}
FEW = ("SGD", "AdamW fused")
# A compiled one takes one step in tests/strategies/test_exact_step.py.
QUICK = [name for name in MODELS if "compiled" not in name]


def loss_fn(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


class Training:
    """One model under several optimizers at once, on the batches of one loader, to save time."""

    def __init__(self, name, optimizers, workers):
        kind, sample = MODELS[name]
        # Microbatches of 4: of a step of 22 samples the last is short, and the last step is too.
        how = {"shuffle": True, "drop_last": False, "microbatch_size": 4, "seed": 7}
        self.loader = make_loader(Augmented(sample), 22, num_workers=workers, **how)
        self.parts = {}
        for optimizer in optimizers:
            torch.manual_seed(world().rank)  # rank 0's weights are everybody's
            model = wrap_model(kind(), "exact")
            self.parts[optimizer] = model, OPTIMIZERS[optimizer](model.parameters())

    def run(self, stop_after=None):
        """Train to the end of two epochs, or for fewer steps; return losses and fingerprints."""
        losses = []
        for _ in range(self.loader.epoch, 2):
            for batch in self.loader:
                losses.append([self.step(*parts, batch) for parts in self.parts.values()])
                if len(losses) == stop_after:
                    return losses, self.fingerprints()
        return losses, self.fingerprints()

    def step(self, model, optimizer, batch):
        optimizer.zero_grad()
        loss = backward(model, loss_fn, batch)
        optimizer.step()
        return loss.item()

    def fingerprints(self):
        return [fingerprint(model) for model, _ in self.parts.values()]

    def stateful(self):
        return [self.loader, *(part for parts in self.parts.values() for part in parts)]

    def save(self, path):
        if world().rank == 0:
            torch.save([part.state_dict() for part in self.stateful()], path)

    def load(self, path):
        for part, state in zip(self.stateful(), torch.load(path), strict=True):
            part.load_state_dict(state)


def undisturbed(names, optimizers, workers):
    return {name: Training(name, optimizers, workers).run() for name in names}


def part_of(names, optimizers, number, folder):
    """Run part `number` of an interrupted run of every model, of six steps."""
    told = {}
    for name in names:
        training = Training(name, optimizers, 0)
        if number:
            training.load(Path(folder) / f"{name}-{number - 1}.pt")
        told[name] = training.run([2, 2, None][number])  # the second goes on in the next epoch
        training.save(Path(folder) / f"{name}-{number}.pt")
    return told


def models_of(optimizers):
    """Return the models that these train; few train those that no compiler makes slow."""
    return [name for name in MODELS if optimizers != FEW or name in QUICK]


@functools.cache
def told_at(size, workers, optimizers):
    given = models_of(optimizers), optimizers, workers
    return run(undisturbed, *given, world_size=size, timeout=500)


@functools.cache
def told_interrupted(optimizers):
    models = models_of(optimizers)
    with tempfile.TemporaryDirectory() as folder:
        return [
            run(part_of, models, optimizers, number, folder, world_size=size, timeout=500)
            for number, size in enumerate([4, 2, 3])
        ]


def check_all_ways(name, ways):
    losses, fingerprints = reference = told_at(1, 0, tuple(OPTIMIZERS))[0][name]
    assert len(losses) == 6
    # AdamW's two implementations may agree to the last bit.
    assert len(set(fingerprints)) >= len(OPTIMIZERS) - 1
    for size, workers in ways:
        for rank, told in enumerate(told_at(size, workers, tuple(OPTIMIZERS))):
            assert told[name] == reference, (size, workers, rank)


def check_interrupted(name, optimizers):
    losses, fingerprints = told_at(1, 0, optimizers)[0][name]
    assert len(set(fingerprints)) > 1
    parts = [[told[name] for told in ranks] for ranks in told_interrupted(optimizers)]
    assert all(told == ranks[0] for ranks in parts for told in ranks)
    assert [len(ranks[0][0]) for ranks in parts] == [2, 2, 2]
    assert [loss for ranks in parts for loss in ranks[0][0]] == losses
    assert parts[-1][0][1] == fingerprints


@pytest.mark.parametrize("name", QUICK)
def test_a_run_resumed_at_other_world_sizes_is_bitwise_equal(name):
    """At 4, 2 and 3 processes, one after the other, as at one without an interruption."""
    check_interrupted(name, FEW)


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_the_same_at_every_size_with_any_workers(name):
    check_all_ways(name, [*itertools.product(SIZES, [0, 2]), (5, 0), (8, 0)])
    check_interrupted(name, tuple(OPTIMIZERS))


@pytest.mark.soak
def test_models_and_optimizers_differ():
    told = told_at(1, 0, tuple(OPTIMIZERS))[0]
    prints = {text for _, fingerprints in told.values() for text in fingerprints}
    assert len(prints) >= len(MODELS) * (len(OPTIMIZERS) - 1)
