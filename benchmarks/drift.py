"""How far the same training drifts apart on other numbers of processes: ddp, and exact.

    python benchmarks/drift.py
    python benchmarks/drift.py --sizes 1 2 --epochs 1

A small net with batch norm and dropout learns scikit-learn's digits: the same global batches in the
same order, the same seed, Adam. Under "ddp" as one writes it by hand, DistributedDataParallel with
each rank's part of the batch and the mean of their losses; under "exact" by pardata.backward with
microbatches. Prints by how much the loss of a step, and a weight, differ at most from those of
the first size, as medians over seeds. With --save also draws drift.png, of the first seed, if
matplotlib is there. Nothing is timed.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _measure import Report, Row, parser, positive, require
from _nets import mean_loss
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import pardata
from pardata.testing import run

STRATEGIES = ("ddp", "exact")


def digits() -> TensorDataset:
    """Return scikit-learn's 1,797 digits."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    return TensorDataset(images, torch.tensor(found.target))


def small_net() -> nn.Module:
    """Return a net with what makes runs differ: batch norm, dropout and sums."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(16 * 4 * 4, 10),
    )


def train(strategy: str, epochs: int, seed: int) -> dict[str, Any]:
    """Train as one of the ranks; return the losses of all steps and what was learnt."""
    here = pardata.world()
    pardata.seed_everything(seed)
    model = pardata.wrap_model(small_net(), strategy)
    if strategy == "ddp":  # for dropout, as one does by hand
        pardata.seed_everything(seed, per_rank=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    pieces = {"microbatch_size": 8} if strategy == "exact" else {}
    loader = pardata.make_loader(digits(), 64, shuffle=True, seed=seed, **pieces)
    losses = []
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            if strategy == "exact":
                loss = pardata.backward(model, mean_loss, batch)
            else:
                own = mean_loss(model, batch)
                own.backward()
                loss = pardata.all_reduce_mean(own.detach())
            optimizer.step()
            losses.append(loss.item())
    weights = torch.cat([p.detach().reshape(-1) for p in pardata.unwrap(model).parameters()])
    pardata.check_in_sync(model)
    fingerprint = pardata.fingerprint(model)
    return {"losses": losses, "weights": weights, "fingerprint": fingerprint, "size": here.size}


def compare(args: argparse.Namespace, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Train under each strategy at each size; return what rank 0 found."""
    found = {
        strategy: [
            run(train, strategy, args.epochs, seed, world_size=size, timeout=1800)[0]
            for size in args.sizes
        ]
        for strategy in STRATEGIES
    }
    fingerprints = {report["fingerprint"] for report in found["exact"]}
    require(holds=len(fingerprints) == 1, what="exact is not the same at every size")
    return found


def rows(rounds: Sequence[Sequence[dict[str, Any]]]) -> list[Row]:
    """Return by how much each size differs from the first, of the reports of each round."""
    made = []
    for index, report in enumerate(rounds[0]):
        pairs = [(reports[index], reports[0]) for reports in rounds]
        losses = [
            max(abs(a - b) for a, b in zip(one["losses"], first["losses"], strict=True))
            for one, first in pairs
        ]
        weights = [(one["weights"] - first["weights"]).abs().max().item() for one, first in pairs]
        name = f"{report['size']} process(es), {report['fingerprint'][:8]}"
        made += [
            Row(f"{name}: loss of a step, at most", losses),
            Row(f"{name}: a weight, at most", weights),
        ]
    return made


def draw(path: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    """Draw the losses of each strategy at each size, and how far they are from the first."""
    import matplotlib as mpl  # noqa: PLC0415  # only to draw

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  # after the choice of the backend

    figure, panels = plt.subplots(2, 2, figsize=(10, 6.4), layout="constrained", sharex=True)
    titles = {"ddp": "DistributedDataParallel", "exact": 'strategy="exact"'}
    for column, (strategy, reports) in enumerate(found.items()):
        above, below = panels[:, column]
        first = reports[0]
        for index, report in enumerate(reports):
            label = f"{report['size']} process" + ("es" if report["size"] > 1 else "")
            # Lines that are the same line show at its edges, each within the one before.
            width = 1.2 + 2.2 * (len(reports) - 1 - index) if strategy == "exact" else 1.5
            above.plot(_smooth(report["losses"]), label=label, lw=width, color=f"C{index}")
            apart = [abs(a - b) for a, b in zip(report["losses"], first["losses"], strict=True)]
            if report is not first:
                below.plot(apart, label=label, lw=1, color=f"C{index}")
        above.set(title=titles[strategy], yscale="log", ylim=(0.02, 3))
        below.set(yscale="symlog", ylim=(-1e-9, 3), xlabel="step")
        below.set_yscale("symlog", linthresh=1e-8)
        above.grid(alpha=0.3)
        below.grid(alpha=0.3)
        above.legend()
        if strategy == "exact":
            below.text(0.5, 0.5, "0 at every step", ha="center", transform=below.transAxes)
    panels[0, 0].set_ylabel("training loss, mean of 10 steps")
    panels[1, 0].set_ylabel(f"loss of a step, difference from {found['ddp'][0]['size']} process")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"drawn in {path}")


def _smooth(losses: Sequence[float]) -> list[float]:
    return [sum(losses[max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(len(losses))]


def main() -> None:
    """Train, print the tables and draw."""
    arguments = parser(__doc__, 1, "seeds")
    arguments.add_argument(
        "--epochs", type=positive, default=10, help="of 28 steps each (default: 10)"
    )
    arguments.add_argument(
        "--sizes", type=positive, nargs="+", default=[1, 2, 4, 8], help="(default: 1 2 4 8)"
    )
    args = arguments.parse_args()
    report = Report(__file__, args.save)
    rounds = [compare(args, seed) for seed in range(args.rounds)]
    for strategy in STRATEGIES:
        title = f"{strategy}, {args.epochs} epochs, differs from {args.sizes[0]} process(es) by"
        report.add(title, "", rows([found[strategy] for found in rounds]))
    report.save()
    if args.save:
        try:
            draw(args.save / "drift.png", rounds[0])
        except ImportError:
            print("not drawn: matplotlib is not installed")


if __name__ == "__main__":
    main()
