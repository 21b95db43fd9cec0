"""A step with and without `cost`: texts of unequal length, shared by two processes.

    python benchmarks/balance.py
    python benchmarks/balance.py --rounds 2

The lengths are the numbers of characters of the paragraphs in docs/, repeated; without docs/ they
are log-normal. A small transformer predicts the next character, and `count` counts characters. Its
cost is a function of the length, because attention is quadratic. Both contenders train the same
global batches in the same microbatches, on two processes of one thread. The limit is half of the
time in which each process alone, at the same time as the other, trains all microbatches of the step
without communication. The ratios are those of the same step.
"""

import math
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _measure import Report, Row, alternate, parser, require
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import pardata
from pardata.testing import run

PAGES = Path(__file__).parents[1] / "docs"
CHARACTERS, WIDTH, LAYERS, BATCH, MICROBATCH, WARM_UP = 256, 192, 3, 48, 1, 3
STARTS = 60  # to start the kernels of a microbatch takes as long as so many characters
WAYS = ("with `cost`", "without", "limit")


class Texts:
    """Random characters, in texts of given lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(1, CHARACTERS, (self.lengths[index],))

    def cost(self, index: int) -> int:
        """Return what a text costs: its matrix products, its attention, and the kernels' starts."""
        length = self.lengths[index]
        return (length + STARTS) * 6 * WIDTH + length**2


class Net(nn.Module):
    """A transformer of three layers that predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        """Return the logits of each next character."""
        mask = nn.Transformer.generate_square_subsequent_mask(texts.shape[1])
        return self.head(self.layers(self.embedding(texts), mask, is_causal=True))


def lengths_of_paragraphs(count: int) -> list[int]:
    """Return `count` numbers of characters, from 8 up to 1024."""
    pages = [page.read_text() for page in sorted(PAGES.glob("*.md"))]
    draw = random.Random(0)  # noqa: S311  # no secret
    found = [len(paragraph) for page in pages for paragraph in page.split("\n\n")]
    found = found or [round(draw.lognormvariate(5, 1)) for _ in range(count)]
    return [min(max(length, 8), 1024) for length in draw.choices(found, k=count)]


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    """Return texts as rows, padded to the longest."""
    return pad_sequence(samples, batch_first=True)


def tokens(texts: torch.Tensor) -> int:
    """Return the number of characters that are predicted."""
    return int((texts[:, 1:] > 0).sum())


def mean_loss(model: nn.Module, texts: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the predicted characters."""
    outputs = model(texts[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(outputs, texts[:, 1:].flatten(), ignore_index=0)


def train(strategy: str, rounds: int) -> dict[str, Any]:
    """Train in all ways in turns, as one of the ranks; return what each step took."""
    pardata.init(device="cpu")
    torch.set_num_threads(1)
    texts = Texts(lengths_of_paragraphs((WARM_UP + rounds) * BATCH))
    nets, loaders, optimizers = {}, {}, {}
    for way in WAYS:
        torch.manual_seed(0)
        nets[way] = pardata.wrap_model(Net(), "none" if way == "limit" else strategy)
        optimizers[way] = torch.optim.AdamW(nets[way].parameters(), lr=1e-3)
        loaders[way] = pardata.make_loader(
            texts,
            BATCH,
            shuffle=True,
            seed=0,
            microbatch_size=MICROBATCH,
            cost=texts.cost if way == WAYS[0] else None,
            distributed=False if way == "limit" else "auto",
            collate_fn=padded,
            num_workers=0,
        )
    steps = {way: iter(loader) for way, loader in loaders.items()}

    def step(way: str) -> float:
        batch = next(steps[way])
        pardata.barrier()
        start = time.perf_counter()
        optimizers[way].zero_grad()
        pardata.backward(nets[way], mean_loss, batch, count=tokens)
        optimizers[way].step()
        taken: float = pardata.all_reduce_max(time.perf_counter() - start)
        return taken / 2 if way == "limit" else taken

    seconds = alternate({way: partial(step, way) for way in WAYS}, WARM_UP + rounds)
    norms = [sum(p.double().norm().item() for p in net.parameters()) for net in nets.values()]
    stats = loaders[WAYS[0]].stats()
    imbalance = stats["imbalance"], stats["imbalance_by_number"]
    return {"seconds": seconds, "norms": norms, "imbalance": imbalance}


def main() -> None:
    """Measure each strategy and print the tables."""
    args = parser(__doc__, 40, "steps of each way, in turns").parse_args()
    report = Report(__file__, args.save)
    for strategy in ("ddp", "exact"):
        found = run(train, strategy, args.rounds, world_size=2, timeout=3600)[0]
        norms = found["norms"]
        is_same = all(math.isclose(norm, norms[0], rel_tol=1e-2) for norm in norms)
        require(holds=is_same, what=f"the norms of their weights are {norms}")
        seconds = {way: taken[WARM_UP:] for way, taken in found["seconds"].items()}
        target = "cost, ddp" if strategy == "ddp" else ""
        rows = [Row("limit", seconds["limit"])]
        rows.append(Row.compare(seconds, WAYS[0], "limit", target))
        rows += [Row.compare(seconds, "without", "limit"), Row.compare(seconds, *WAYS[:2])]
        shares = "largest share over the mean: {:.2f} with `cost`, {:.2f} without"
        title = f"{strategy}, 2 processes, batches of {BATCH} texts in microbatches of {MICROBATCH}"
        report.add(f"{title}; {shares.format(*found['imbalance'])}", "s a step", rows)
    report.save()


if __name__ == "__main__":
    main()
