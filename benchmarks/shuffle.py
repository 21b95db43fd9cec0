"""What a shuffled order costs: time and memory to the first batch, and time per sample after it.

    python benchmarks/shuffle.py
    python benchmarks/shuffle.py --rounds 1 --powers 3 6 9
    python benchmarks/shuffle.py --save

make_loader, whose order is computed as it goes, against a DataLoader with PyTorch's
DistributedSampler, which draws the whole order as a list: of a dataset without contents, of 10^3
to 10^9 samples (the sampler: to 10^8, where it takes gigabytes), in batches of 256. Each
measurement has a fresh process that has torch and pardata; its memory is the most that it had
resident since, over what it had before. Then, without a break, the next samples, on into further
epochs where one has too few. Linux only. With --save also draws shuffle.png, if matplotlib is
there.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _measure import Report, Row, alternate, parser, positive, require
from _targets import TARGETS
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from pardata import make_loader
from pardata.testing import run

OURS, SAMPLER = "make_loader", "DistributedSampler"
BATCH = 256
STATUS = Path("/proc/self/status")

QUANTITIES = {
    "ms to the first batch": "first batch, ms",
    "MB to the first batch": "first batch, MB",
    "us a sample after it": "a sample, us",
}


class Numbers(Dataset[int]):
    """The numbers from 0 up: a dataset of any length that takes no memory."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def our_batches(dataset: Dataset[int]) -> Iterator[Tensor]:
    """Yield batch after batch, epoch after epoch."""
    loader = make_loader(dataset, BATCH, shuffle=True, seed=0)
    while True:
        yield from loader


def sampler_batches(dataset: Dataset[int]) -> Iterator[Tensor]:
    """Yield batch after batch, epoch after epoch, as the only rank."""
    sampler: DistributedSampler[int] = DistributedSampler(dataset, 1, 0)
    loader = DataLoader(dataset, BATCH, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


CONTENDERS = {OURS: our_batches, SAMPLER: sampler_batches}


def measure(name: str, length: int, batches: int) -> dict[str, float]:
    """Run in a fresh process: return the quantities."""
    dataset = Numbers(length)
    # From here on the kernel counts anew what was resident at most: see proc(5).
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    start = time.perf_counter()
    source = CONTENDERS[name](dataset)
    first = next(source)
    seconds = time.perf_counter() - start
    memory = resident("VmHWM") - before
    begin = time.perf_counter()
    taken = list(islice(source, batches))
    after = time.perf_counter() - begin
    check(torch.cat([first, *taken]), length, name)
    return dict(
        zip(QUANTITIES, (seconds * 1e3, memory, after / (batches * BATCH) * 1e6), strict=True)
    )


def resident(which: str) -> float:
    """Return megabytes (of a million bytes) from what the kernel says of this process."""
    lines = STATUS.read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{which}:"))
    return int(size) * 1024 / 1e6


def check(samples: Tensor, length: int, name: str) -> None:
    """Stop where these are not the first samples of shuffled epochs, each once."""
    for epoch in samples.split(length // BATCH * BATCH):
        require(
            holds=epoch.unique().numel() == len(epoch) and int(epoch.min()) >= 0,
            what=f"{name} repeats samples",
        )
        require(
            holds=int(epoch.max()) < length and not bool((epoch.diff() > 0).all()),
            what=f"{name} does not shuffle {length} samples",
        )


def in_a_fresh_process(name: str, length: int, batches: int) -> dict[str, float]:
    """Return what `measure` does there."""
    return run(measure, name, length, batches, world_size=1, timeout=3600)[0]


def draw(path: Path, found: dict[tuple[str, int], list[dict[str, float]]]) -> None:
    """Draw time and memory to the first batch against the number of samples."""
    import matplotlib as mpl  # noqa: PLC0415  # only to draw

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  # after the choice of the backend

    figure, panels = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    first_batch = list(QUANTITIES.items())[:2]
    units = [("s", "seconds", 1e-3), ("MB", "megabytes", 1.0)]
    styles: dict[str, dict[str, Any]] = {
        SAMPLER: {"color": "tab:orange", "marker": "s", "label": "PyTorch's DistributedSampler"},
        OURS: {"color": "tab:blue", "marker": "o", "label": "pardata's make_loader"},
    }
    titles = ["Time to the first batch", "Memory to the first batch"]
    for axes, (quantity, target), (unit, label, scale), title in zip(
        panels, first_batch, units, titles, strict=True
    ):
        for name, style in styles.items():
            points = [
                (length, median(report[quantity] for report in reports) * scale)
                for (who, length), reports in found.items()
                if who == name
            ]
            if points:
                axes.plot(*zip(*points, strict=True), **style)
                length, value = points[-1]
                where = {"xytext": (0, 7), "textcoords": "offset points", "ha": "right"}
                axes.annotate(f"{float(f'{value:.2g}'):,g} {unit}", (length, value), **where)
        bound = TARGETS[target].limit * scale
        axes.axhline(bound, color="gray", ls="--", lw=1, label=f"to stay below: {bound:g} {unit}")
        axes.set(xscale="log", yscale="log", title=title, ylabel=label)
        axes.set_xlabel("samples in the dataset")
        axes.margins(y=0.13)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"drawn in {path}")


def main() -> None:
    """Measure each contender at each length, and print the tables."""
    arguments = parser(__doc__, 3, "fresh processes of each contender and length")
    arguments.add_argument(
        "--powers",
        type=positive,
        nargs="+",
        default=list(range(3, 10)),
        help="of ten, of which there are so many samples (default: 3 to 9)",
    )
    arguments.add_argument(
        "--sampler-up-to",
        type=positive,
        default=8,
        help="the greatest power that DistributedSampler gets (default: 8)",
    )
    arguments.add_argument(
        "--batches", type=positive, default=400, help="after the first (default: 400)"
    )
    args = arguments.parse_args()
    if not STATUS.exists():
        sys.exit("what is resident is read from /proc, which this system does not have")
    if min(args.powers) < 3:
        arguments.error(f"--powers must be 3 or more, for a batch of {BATCH}")
    report = Report(__file__, args.save)
    found = compare(args)
    for quantity, target in QUANTITIES.items():
        title = f"{quantity}: N samples, batches of {BATCH}, {args.rounds} fresh processes each"
        rows = [
            Row(
                f"{name}, N = 10^{len(str(length)) - 1}",
                [measured[quantity] for measured in rounds],
                target=target if name == OURS else "",
            )
            for (name, length), rounds in found.items()
        ]
        report.add(title, quantity.partition(" ")[0], rows)
    report.save()
    if args.save:
        try:
            draw(args.save / "shuffle.png", found)
        except ImportError:
            print("not drawn: matplotlib is not installed")


def compare(args: argparse.Namespace) -> dict[tuple[str, int], list[dict[str, float]]]:
    """Measure all in turns; return what each round found."""
    calls = {
        (name, 10**power): partial(in_a_fresh_process, name, 10**power, args.batches)
        for name in CONTENDERS
        for power in args.powers
        if name == OURS or power <= args.sampler_up_to
    }
    # The server from which the processes come begins with the first of them.
    in_a_fresh_process(OURS, 10 ** min(args.powers), 1)
    return alternate(calls, args.rounds)


if __name__ == "__main__":
    main()
