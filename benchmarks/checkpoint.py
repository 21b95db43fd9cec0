"""How long training waits for a checkpoint: Checkpointer against torch.save and dcp.async_save.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --rounds 1 --model resnet18

ResNet-50 with Adam, some 280 MB of state, in one process on a CPU, to a fresh directory each time.
"s in the call" is what a training loop waits for; "s to the end" is when the checkpoint is there.
A bare ``torch.save`` is what loops do by hand: it does not wait for the disk, and what was killed
in it is lost. "copy" is the state copied in memory, which no asynchronous save can do without.
Needs torchvision.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torchvision
from _measure import Report, Row, alternate, parser
from torch.nn.functional import cross_entropy

import pardata

# Begins to save to a directory, and returns how to wait for the end.
Begin = Callable[["Training", Path], Callable[[], object]]


class Training:
    """A model that has learnt made-up images, so that its optimizer has a state."""

    def __init__(self, model: str) -> None:
        torch.manual_seed(0)
        self.model = getattr(torchvision.models, model)(num_classes=10)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        images, labels = torch.randn(4, 3, 64, 64), torch.randint(10, (4,))
        cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def copied(training: Training, _directory: Path) -> Callable[[], object]:
    """Copy the state in memory, and write nothing."""
    kept = [tensor.clone() for tensor in _tensors(training.state())]
    return kept.clear


def torch_save(training: Training, directory: Path) -> Callable[[], object]:
    """Write a file as loops do by hand."""
    torch.save(training.state(), directory / "checkpoint.pt")
    return lambda: None


def torch_save_synced(training: Training, directory: Path) -> Callable[[], object]:
    """Write a file that is there as a whole or not at all, by hand."""
    with (directory / "unfinished.pt").open("wb") as file:
        torch.save(training.state(), file)
        file.flush()
        os.fsync(file.fileno())
    (directory / "unfinished.pt").replace(directory / "checkpoint.pt")
    return lambda: None


def dcp_async_save(training: Training, directory: Path) -> Callable[[], object]:
    """Write by PyTorch's distributed checkpoint, in the background."""
    future: Any = dcp.async_save(training.state(), checkpoint_id=directory)
    return future.result  # type: ignore[no-any-return]  # torch returns one of two classes


def checkpointer(
    training: Training, directory: Path, *, asynchronous: bool
) -> Callable[[], object]:
    """Write by pardata."""
    saver = pardata.Checkpointer(directory, asynchronous=asynchronous)
    saver.save(1, model=training.model, optimizer=training.optimizer)
    return saver.wait


CONTENDERS: dict[str, Begin] = {
    "copy": copied,
    "torch.save": torch_save,
    "torch.save, synced": torch_save_synced,
    "dcp.async_save": dcp_async_save,
    "Checkpointer": partial(checkpointer, asynchronous=False),
    "Checkpointer, asynchronous": partial(checkpointer, asynchronous=True),
}

PAIRS = {
    "s in the call": [
        ("Checkpointer, asynchronous", "copy", "checkpoint, over the copy"),
        ("Checkpointer, asynchronous", "torch.save", ""),
        ("Checkpointer, asynchronous", "dcp.async_save", "checkpoint, over dcp.async_save"),
        ("Checkpointer", "torch.save", ""),
        ("Checkpointer", "torch.save, synced", ""),
    ],
    "s to the end": [
        ("Checkpointer, asynchronous", "dcp.async_save", ""),
        ("Checkpointer", "torch.save, synced", ""),
    ],
}


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return (
        [tensor for item in tree.values() for tensor in _tensors(item)]
        if (isinstance(tree, dict))
        else []
    )


def measure(training: Training, begin: Begin) -> dict[str, float]:
    """Save once; return how long that took."""
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        wait = begin(training, Path(directory))
        in_the_call = time.perf_counter() - start
        wait()
        to_the_end = time.perf_counter() - start
    return {"s in the call": in_the_call, "s to the end": to_the_end}


def compare(training: Training, rounds: int) -> dict[str, list[Row]]:
    """Measure all in turns; return a table for each quantity."""
    pardata.init(device="cpu")  # dcp.async_save needs a group
    for begin in CONTENDERS.values():
        measure(training, begin)  # whatever is imported, and the memory, is there from now on
    found = alternate(
        {name: partial(measure, training, begin) for name, begin in CONTENDERS.items()}, rounds
    )
    tables = {}
    for quantity, pairs in PAIRS.items():
        times = {name: [taken[quantity] for taken in took] for name, took in found.items()}
        alone = [Row(name, values) for name, values in times.items()]
        tables[quantity] = alone + [Row.compare(times, *pair) for pair in pairs]
    return tables


def main() -> None:
    """Measure and print the tables."""
    arguments: argparse.ArgumentParser = parser(__doc__, 7, "saves of each contender")
    arguments.add_argument("--model", default="resnet50", help="of torchvision (default: resnet50)")
    args = arguments.parse_args()
    report, training = Report(__file__, args.save), Training(args.model)
    size = sum(tensor.nbytes for tensor in _tensors(training.state())) / 1e6
    for quantity, rows in compare(training, args.rounds).items():
        report.add(f"{args.model} with Adam, {size:.0f} MB: {quantity}", "", rows)
    report.save()


if __name__ == "__main__":
    main()
