"""One hash over "exact" and "exact_fsdp": at any size, interrupted or not, sharded by blocks.

Losses, weights, buffers and the optimizer's state; each rank tells its own.
"""

import functools
import hashlib

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from on_ranks import run
from sharding import needs_exact_fsdp, whole
from torch import nn, optim
from torch.utils.data import TensorDataset

from pardata import Checkpointer, backward, check_in_sync, fingerprint, make_loader, wrap_model

pytestmark = pytest.mark.soak  # the strategy is about to go

COUNTS = (6, 7, 8, 12)  # of microbatches in a step
EVERY_DAY = (7, 12)  # no number of ranks divides the one, and each the other
STRATEGIES = ("exact", "exact_fsdp")


class ConvNet(nn.Module):
    """Convolutions, batch norm, dropout, a layer that is never used, and one now and then."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5)
        self.second = nn.Conv2d(5, 7, 3, bias=False)
        self.last = nn.Sequential(nn.Dropout(0.3), nn.Flatten(), nn.Linear(112, 10))
        self.rare, self.spare = nn.Linear(112, 10), nn.Linear(3, 3)

    def forward(self, images):
        hidden = torch.relu(self.second(torch.relu(self.norm(self.first(images)))))
        # What is used depends on the microbatch, and so differs between ranks.
        return self.last(hidden) + (self.rare(hidden.flatten(1)) if images.sum() > 0 else 0)


class Transformer(nn.Module):
    """Blocks with dropout and layer norm, and a table that is the first and the last layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.2, batch_first=True) for _ in range(3)
        )
        self.words = nn.Linear(16, 40, bias=False)
        self.words.weight = self.table.weight

    def forward(self, words):
        hidden = self.table(words)
        for block in self.blocks:
            hidden = block(hidden)
        return self.words(hidden)


def images(count):
    numbers = torch.Generator().manual_seed(5)
    pictures = torch.randn(count, 1, 8, 8, generator=numbers)
    return pictures, torch.randint(10, (count,), generator=numbers)


def sentences(count):
    words = torch.randint(40, (count, 9), generator=torch.Generator().manual_seed(5))
    return words, (words + 1) % 40


# How a net is made, its data and its blocks.
NETS = {
    "convnet": (ConvNet, images, nn.Conv2d),
    "transformer": (Transformer, sentences, "auto"),
    "transformer in bfloat16": (lambda: Transformer().bfloat16(), sentences, "auto"),
}
OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda p: optim.Adam(p, lr=1e-3),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=1e-3, foreach=True),
}


def loss_fn(model, batch):
    inputs, targets = batch
    scores = model(inputs).float().flatten(0, -2)
    loss = F.cross_entropy(scores, targets.flatten())
    return loss, {"right": (scores.argmax(1) == targets.flatten()).float().mean()}


class Training:
    def __init__(self, name, strategy, count, optimizer="Adam", microbatch_size=3):
        kind, data_of, blocks = NETS[name]
        torch.manual_seed(0)
        options = {"blocks": blocks} if strategy == "exact_fsdp" else {}
        self.model = wrap_model(kind(), strategy, **options)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        size = microbatch_size * count - 1  # the last microbatch is short, and the last step too
        self.loader = make_loader(
            TensorDataset(*data_of(6 * size - microbatch_size)),
            *(size,),
            microbatch_size=microbatch_size,
            strided=strategy == "exact_fsdp",
            shuffle=True,
            drop_last=False,
            seed=0,
            num_workers=0,
        )
        self.told = []

    def objects(self):
        return {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}

    def train(self, steps=6):
        for batch in self.loader:
            self.optimizer.zero_grad()
            loss, metrics = backward(self.model, loss_fn, batch)
            self.optimizer.step()
            self.told.append((loss.item(), metrics["right"].item()))
            if (steps := steps - 1) == 0:
                break
        return self

    def digest(self):
        check_in_sync(self.model)
        state = self.optimizer.state_dict()["state"]
        values = [whole(v) for own in state.values() for v in own.values() if torch.is_tensor(v)]
        bits = [v.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for v in values]
        text = repr((fingerprint(self.model), bits, self.loader.fingerprint()))
        return hashlib.sha256(text.encode()).hexdigest()


def trained(name, optimizer="Adam", strategies=STRATEGIES, counts=COUNTS):
    """Return, by strategy and number of microbatches, the losses and a digest of the rest."""
    found = {}
    for strategy in strategies:
        for count in counts:
            run_of = Training(name, strategy, count, optimizer).train()
            found[strategy, count] = run_of.told, run_of.digest()
    return found


@functools.cache
def expected(name, optimizer="Adam", counts=EVERY_DAY):
    (told,) = run(trained, name, optimizer, ("exact",), counts, world_size=1)
    return {count: told["exact", count] for count in counts}


def check_one_hash(name, optimizer, sizes, strategies=STRATEGIES, counts=COUNTS):
    reference = expected(name, optimizer, counts)
    assert len({digest for _, digest in reference.values()}) == len(counts)
    assert all(len(losses) == 6 for losses, _ in reference.values())
    for size in sizes:
        given = name, optimizer, strategies, counts
        everyone = run(trained, *given, world_size=size, timeout=300)
        for rank, told in enumerate(everyone):
            for (strategy, count), found in told.items():
                assert found == reference[count], (strategy, count, size, rank)


@needs_exact_fsdp
@pytest.mark.parametrize("name", NETS)
def test_a_sharded_model_has_the_bits_of_one_that_is_not_at_every_size(name):
    # "exact" on several ranks: test_exact_matrix.py, and below.
    check_one_hash(name, "Adam", [2, 3, 4], ["exact_fsdp"], EVERY_DAY)


@needs_exact_fsdp
@pytest.mark.soak
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["convnet", "transformer"])
def test_so_it_has_with_each_optimizer_and_more_ranks(name, optimizer):
    check_one_hash(name, optimizer, [1, 2, 3, 4, 5, 8])


def part_of(name, strategy, before, steps, after):
    """Run a part of a run, of six steps, from a checkpoint to another."""
    part = Training(name, strategy, 7)
    if before is not None:
        Checkpointer(before).restore(**part.objects())
    part.train(steps)
    if after is not None:
        Checkpointer(after).save(1, **part.objects())
    return part.told, part.digest()


@needs_exact_fsdp
@pytest.mark.parametrize("name", ["convnet", "transformer"])
def test_it_goes_on_at_another_size_and_under_the_other_strategy(name, tmp_path):
    losses, digest = expected(name)[7]
    told, before = [], None
    for number, (strategy, size, steps) in enumerate(
        [("exact_fsdp", 3, 2), ("exact", 2, 1), ("exact_fsdp", 2, 2), ("exact_fsdp", 4, 1)]
    ):
        after = tmp_path / str(number)
        found = run(part_of, name, strategy, before, steps, after, world_size=size, timeout=300)
        assert all(each == found[0] for each in found)
        told += found[0][0]
        before = after
    assert told == losses
    assert found[0][1] == digest
