"""Draw the curves of a run: ``python examples/articles/curves.py runs/mnist`` writes curves.png."""

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # to files only: clusters have no display
from matplotlib import pyplot as plt  # after the choice of the backend
from matplotlib.axes import Axes  # likewise


def draw(run_dir: str | Path) -> Path:
    """Draw ``metrics.jsonl`` of `run_dir` into ``curves.png`` next to it and return its path."""
    rows = _rows(Path(run_dir) / "metrics.jsonl")
    figure, (loss, accuracy) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    _line(loss, rows, "train/loss", "training, global batch", color="tab:blue", alpha=0.6)
    _line(loss, rows, "test/loss", "test set", color="tab:orange", marker="o")
    loss.set(xlabel="step (global batches)", ylabel="loss (nats)", title="Loss", ylim=(0, None))
    _line(accuracy, rows, "test/accuracy", "test set", color="tab:orange", marker="o")
    accuracy.set(xlabel="step (global batches)", ylabel="accuracy (%)", title="Accuracy")
    for axes in (loss, accuracy):
        axes.grid(alpha=0.3)
        axes.legend()
    path = Path(run_dir) / "curves.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _rows(path: Path) -> list[dict[str, float]]:
    """Read the lines of a run, of steps that were done again the last ones.

    A run that was killed resumes from its last checkpoint, and one from the beginning replaces all.
    """
    rows: list[dict[str, float]] = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        while rows and row["step"] < rows[-1]["step"]:
            rows.pop()
        rows.append(row)
    return rows


def _line(axes: Axes, rows: list[dict[str, float]], key: str, label: str, **style: object) -> None:
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), float | int)]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)


if __name__ == "__main__":
    print(draw(sys.argv[1]))
