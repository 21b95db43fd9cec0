"""Draw images/hero.svg: one training at 1, 2 and 4 processes, with hand-written DDP and "exact".

    python docs/hero.py                                # takes a minute
    python docs/hero.py --epochs 1 --out hero.svg

A net with batch norm and dropout learns scikit-learn's handwritten digits. By hand: PyTorch's
DistributedDataParallel, DistributedSampler and DataLoader, seeded with the rank, as its tutorials
have it. With pardata: strategy "exact". Each curve and each hash is of another run.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pardata
from pardata.testing import run

BATCH_SIZE, MICROBATCH_SIZE, SIZES = 64, 8, (1, 2, 4)
SMOOTHED = 8  # steps
INK = "#010203"  # stands for the color of text, which the page's light or dark decides
STYLE = """<style>
svg { color: #1f2328 }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3 } }
</style>"""


def digits() -> TensorDataset:
    """Return scikit-learn's digits."""
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    return TensorDataset(images.view(-1, 1, 8, 8).float() / 16, labels)


def net() -> nn.Module:
    """Return the net, with weights from the seed of now."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(256, 10)),
    )


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean loss over the images of `batch`."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def by_hand(epochs: int) -> tuple[list[float], str]:
    """Train as PyTorch's tutorials do; return the losses and a hash of the weights."""
    rank, size, data, losses = dist.get_rank(), dist.get_world_size(), digits(), []
    torch.manual_seed(0)
    model = DistributedDataParallel(net())
    torch.manual_seed(rank)  # dropout must differ
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler: Any = DistributedSampler(data, seed=0, drop_last=True)
    loader: Any = DataLoader(data, BATCH_SIZE // size, sampler=sampler, drop_last=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = mean_loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(pardata.all_reduce_mean(loss).item())
    return losses, pardata.fingerprint(model.module)


def exact(epochs: int) -> tuple[list[float], str]:
    """Train with pardata; return the losses and a hash of the weights."""
    losses = []
    pardata.seed_everything(0)
    model = pardata.wrap_model(net(), "exact")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = pardata.make_loader(
        digits(), BATCH_SIZE, microbatch_size=MICROBATCH_SIZE, shuffle=True
    )
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            losses.append(pardata.backward(model, mean_loss, batch).item())
            optimizer.step()
    return losses, pardata.fingerprint(model)


def smoothed(losses: list[float]) -> list[float]:
    """Return the means of so many steps that follow each other."""
    means: list[float] = torch.tensor(losses).unfold(0, SMOOTHED, 1).mean(dim=1).tolist()
    return means


def draw(found: dict[str, dict[int, tuple[list[float], str]]], out: Path) -> None:
    """Draw the curves, in the colors of a light or of a dark page."""
    # Here, as each process of a run would import them, and draws nothing.
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib import pyplot as plt  # noqa: PLC0415

    kinds = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
    mpl.rcParams.update(dict.fromkeys(kinds, INK) | {"font.size": 15, "svg.fonttype": "none"})
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    mpl.rcParams.update({"axes.titlesize": 15, "legend.fontsize": 14, "legend.title_fontsize": 14})
    mpl.rcParams["svg.hashsalt"] = "hero"  # the same file from the same numbers
    figure, axes = plt.subplots(1, 2, figsize=(8, 4), sharey=True, layout="constrained")
    for panel, (how, runs) in zip(axes, found.items(), strict=True):
        one = len({weights for _, weights in runs.values()}) == 1
        title = f"{how}: {'one result' if one else 'three results'}"
        for (size, (losses, weights)), wide, color in zip(
            runs.items(), (8, 4.5, 1.6), ("#6baed6", "#fd8d3c", "#31a354"), strict=True
        ):
            label = f"{size} process{'es' * (size > 1)}: {weights[:8]}"
            panel.plot(smoothed(losses), lw=wide if one else 2, color=color, label=label)
        panel.set(title=title, xlabel="optimizer step", yscale="log")
        panel.grid(alpha=0.2)
        panel.legend(frameon=False, title="SHA-256 of the weights")
    axes[0].set_ylabel(f"training loss, mean of {SMOOTHED} steps")
    figure.savefig(out, transparent=True, metadata={"Date": None})
    text = out.read_text().replace(INK, "currentColor")
    out.write_text(re.sub(r"(<svg[^>]*>)", rf"\1{STYLE}", text, count=1))


def main() -> None:
    """Train, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Path(__file__).parent / "images" / "hero.svg"
    parser.add_argument("--epochs", type=int, default=4, help="of each run")
    parser.add_argument("--out", type=Path, default=default, help="the picture's file")
    args = parser.parse_args()
    found: dict[str, dict[int, tuple[list[float], str]]] = {}
    for title, train in {"hand-written DDP": by_hand, 'strategy="exact"': exact}.items():
        found[title] = {}
        for size in SIZES:
            losses, weights = run(train, args.epochs, world_size=size, timeout=600)[0]
            print(f"{title}, {size} process(es): loss {losses[-1]:.6f}, weights {weights[:8]}")
            found[title][size] = losses, weights
    draw(found, args.out)


if __name__ == "__main__":
    main()
