"""How long an epoch of training on MNIST takes on CPUs, and how much of that is waiting for data.

    python benchmarks/epoch.py
    python benchmarks/epoch.py --rounds 1 --samples 60000
    python benchmarks/epoch.py --workers-table 0 2 4     # also the tables of num_workers
    python benchmarks/epoch.py --save

The net of articles/mnist.py, global batch 512, Adam, in one process and in two that share the
cores. The tutorial's way, DistributedSampler, DistributedDataParallel and DataLoader without
workers; pardata, plain and from cache_dataset; and the limit, the same steps as those of the cached
loader with every batch ready in memory. The latter three with the allocator as it is and as init
tunes it, which lasts for the life of a process: so each measurement takes fresh ones. The losses of
the cached loader and of its limit must be equal to the bit.

--workers-table trains with a random affine, in one process and some epochs, with so many workers:
for how long each step waits for its batch and computes, as in the tables that people make to choose
num_workers. With --save also draws epoch.png, if matplotlib is there. Needs torchvision.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from _images import Images, add_data_dir, add_samples, mnist, mnist_affine
from _measure import (
    Reach,
    Row,
    alternate,
    parser,
    positive,
    print_environment,
    print_table,
    require,
    save,
    usable_cores,
)
from _nets import conv_net
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import pardata
from pardata import cache_dataset, make_loader
from pardata.testing import run

NOT_TUNED, TUNED = "tune_cpu=False", "tune_cpu=True"
TUTORIAL, PLAIN, CACHED, READY = "the tutorial", "pardata", "pardata, cached", "limit: all ready"
# Of the tutorial's time, with the allocator tuned, at this size; and of the limit's, at any.
OF_TUTORIAL = {1: Reach(0.55), 2: Reach(0.65)}
OF_LIMIT = Reach(1.05)
WAITING = "of that waiting for data: "

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Training:
    """What a process trains with.

    Attributes:
        source: which batches: the tutorial's, or pardata's of some kind.
        images: of which.
        cache: the directory of the cache.
        batch_size: of all ranks together.
        tune_cpu: whether init tunes the allocator.
        workers: of each loader.
        epochs: how many.
        test: the images on which to count what is right afterwards; None for not at all.
    """

    source: str
    images: Images
    cache: str
    batch_size: int
    tune_cpu: bool = False
    workers: int = 0
    epochs: int = 1
    test: Images | None = None


def train(how: Training) -> dict[str, Any]:
    """Train as one of the ranks; return the times of all ranks together, and their losses."""
    if how.source != TUTORIAL:
        pardata.init(device="cpu", tune_cpu=how.tune_cpu)
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    torch.set_num_threads(max(1, usable_cores() // size))
    torch.manual_seed(0)
    model: nn.Module = conv_net()
    wrap = DistributedDataParallel if how.source == TUTORIAL else pardata.wrap_model
    model = wrap(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    batches = SOURCES[how.source](how)
    step = Step(model, optimizer)
    # What is done but once, as in the first step of an optimizer, is no part of an epoch.
    share = how.batch_size // size
    step((torch.zeros(share, 1, 28, 28), torch.zeros(share, dtype=torch.int64)))
    step.seconds = 0.0
    torch.manual_seed(rank)  # the same dropout for all contenders
    losses = []
    torch.distributed.barrier()
    start = time.perf_counter()
    for epoch in range(how.epochs):
        losses += [step(batch) for batch in batches(epoch)]
    seconds = time.perf_counter() - start
    # A rank that waits for the other does so in its step.
    spent = {"seconds": seconds, "waiting": seconds - step.seconds}
    correct = None if how.test is None else count_correct(model, how.test)
    return {
        "losses": pardata.all_gather(losses),
        "spent": pardata.all_reduce_mean(spent),
        "steps": len(losses),
        "correct": correct,
    }


class Step:
    """A training step that takes its time."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self.seconds = 0.0

    def __call__(self, batch: Batch) -> float:
        """Train on a batch; return the loss."""
        start = time.perf_counter()
        images, labels = batch
        self._optimizer.zero_grad()
        loss = cross_entropy(self._model(images), labels)
        loss.backward()
        self._optimizer.step()
        value = loss.item()
        self.seconds += time.perf_counter() - start
        return value


Source = Callable[[Training], Callable[[int], Any]]


def tutorial(how: Training) -> Callable[[int], Any]:
    """Return, for an epoch, the batches as tutorials read them."""
    dataset = how.images.one_by_one()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    share = how.batch_size // torch.distributed.get_world_size()
    loader: DataLoader[Batch] = DataLoader(
        dataset, share, sampler=sampler, drop_last=True, num_workers=how.workers
    )

    def batches(epoch: int) -> DataLoader[Batch]:
        sampler.set_epoch(epoch)
        return loader

    return batches


def plain(how: Training) -> Callable[[int], Any]:
    """Return, for an epoch, the batches of pardata with nothing cached."""
    dataset = how.images.one_by_one()
    loader = make_loader(dataset, how.batch_size, shuffle=True, seed=0, num_workers=how.workers)
    return lambda _epoch: loader


def cached(how: Training) -> Callable[[int], Any]:
    """Return, for an epoch, the batches of pardata from a cache that is there."""
    dataset = cache_dataset(how.images.read(None), how.cache)
    ours = partial(make_loader, dataset, how.batch_size, shuffle=True, seed=0)
    transform = how.images.transform
    if how.images.augment_batch is None:
        loader = ours(batch_transform=transform)
        return lambda _epoch: loader
    size = torch.distributed.get_world_size()
    pieces = ours(batch_transform=transform, microbatch_size=how.batch_size // size)

    def batches(_epoch: int) -> Iterator[Batch]:
        for (batch,) in pieces:
            yield batch

    return batches


def ready(how: Training) -> Callable[[int], Any]:
    """Return, for an epoch, what `cached` yields first, read before."""
    batches = list(cached(how)(0))
    return lambda _epoch: batches


SOURCES: dict[str, Source] = {TUTORIAL: tutorial, PLAIN: plain, CACHED: cached, READY: ready}


@torch.no_grad()
def count_correct(model: nn.Module, images: Images) -> float:
    """Return the percentage of the images that the model, in this one process, gets right."""
    model.eval()
    loader = DataLoader(images.one_by_one(), 1000)
    right = sum(int((model(batch).argmax(dim=1) == labels).sum()) for batch, labels in loader)
    return 100 * right / len(loader.dataset)  # type: ignore[arg-type]  # it has a length


def measure(how: Training, size: int) -> dict[str, Any]:
    """Train in fresh processes; return what rank 0 of them reports."""
    env = {"PARDATA_TUNE_CPU": ""}  # it would overrule the argument
    return run(train, how, world_size=size, timeout=3600, env=env)[0]


def compare(size: int, args: argparse.Namespace, cache: str) -> list[Row]:
    """Measure an epoch of each contender in turns; return a row for each comparison."""
    images = mnist(args.data_dir, args.samples)
    ways = {TUTORIAL: Training(TUTORIAL, images, cache, args.batch_size)}
    for tuning in (NOT_TUNED, TUNED):
        for source in (PLAIN, CACHED, READY):
            how = Training(source, images, cache, args.batch_size, tuning == TUNED)
            ways[f"{source}, {tuning}"] = how
    calls = {name: partial(measure, how, size) for name, how in ways.items()}
    found = alternate(calls, args.rounds)
    check(found)
    seconds = {
        name: [report["spent"]["seconds"] for report in reports] for name, reports in found.items()
    }
    rows = [Row(TUTORIAL, seconds[TUTORIAL])]
    for tuning in (NOT_TUNED, TUNED):
        ours, limit = f"{CACHED}, {tuning}", f"{READY}, {tuning}"
        reach = OF_TUTORIAL.get(size) if tuning == TUNED else None
        rows += [
            Row.compare(seconds, f"{PLAIN}, {tuning}", TUTORIAL),
            Row.compare(seconds, ours, TUTORIAL, reach),
            Row.compare(seconds, ours, limit, OF_LIMIT),
            Row.compare(seconds, limit, TUTORIAL),
        ]
    for name, reports in found.items():
        waiting = [report["spent"]["waiting"] for report in reports]
        rows.append(Row(f"{WAITING}{name}", waiting))
    return rows


def check(found: dict[str, list[dict[str, Any]]]) -> None:
    """Stop where the contenders did not do the same work."""
    steps = {report["steps"] for reports in found.values() for report in reports}
    require(holds=len(steps) == 1, what=f"their steps were {sorted(steps)}")
    same = [
        report["losses"]
        for name, reports in found.items()
        if name.startswith((CACHED, READY))
        for report in reports
    ]
    holds = all(losses == same[0] for losses in same)
    require(holds=holds, what=f"the losses of {CACHED!r} and {READY!r} differ")


@dataclass(frozen=True)
class Tried:
    """A line of the table of workers: seconds of a step, and of the whole; percent."""

    name: str
    load: float
    update: float
    total: float
    accuracy: float

    @classmethod
    def of(cls, name: str, report: dict[str, Any]) -> "Tried":
        """Return the line of what a training reports."""
        total, load = report["spent"]["seconds"], report["spent"]["waiting"]
        steps = report["steps"]
        return cls(name, load / steps, (total - load) / steps, total, report["correct"])


def try_workers(args: argparse.Namespace, cache: str) -> list[Tried]:
    """Train with each number of workers, and ours next to it."""
    images = mnist_affine(args.data_dir, args.samples)
    how = Training(
        TUTORIAL,
        images,
        cache,
        args.batch_size,
        epochs=args.epochs,
        test=mnist(args.data_dir, args.test_samples, train=False),
    )
    ways = {f"DataLoader, {n} workers": replace(how, workers=n) for n in args.workers_table}
    ways |= {
        f"pardata, {n} workers": replace(how, source=PLAIN, workers=n) for n in args.workers_table
    }
    for tuning in (NOT_TUNED, TUNED):
        ways[f"{CACHED}, {tuning}"] = replace(how, source=CACHED, tune_cpu=tuning == TUNED)
    return [Tried.of(name, measure(how, size=1)) for name, how in ways.items()]


def print_workers(title: str, tried: list[Tried]) -> None:
    """Print the table as those that are found in articles."""
    print(f"\n{title}\n")
    print("| | load time, s a step | update time, s a step | total, s | accuracy, % |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for line in tried:
        numbers = f"{line.load:.4f} | {line.update:.4f} | {line.total:.2f} | {line.accuracy:.2f}"
        print(f"| {line.name} | {numbers} |")
    print(flush=True)


def draw(path: Path, epochs: dict[int, list[Row]], tried: list[Tried]) -> None:
    """Draw how long an epoch takes, and, where that was measured, the table of workers."""
    import matplotlib as mpl  # noqa: PLC0415  # only to draw

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  # after the choice of the backend

    count = len(epochs) + bool(tried)
    size_of_each = {"figsize": (5.8 * count, 4.2), "layout": "constrained", "squeeze": False}
    figure, panels = plt.subplots(1, count, **size_of_each)
    for axes, (size, rows) in zip(panels[0], epochs.items(), strict=False):
        times = {row.name: median(row.values) for row in rows}
        names = [name for name in times if not name.startswith(WAITING)]
        waiting = [times[WAITING + name] for name in names]
        computing = [times[name] - times[WAITING + name] for name in names]
        bars(axes, names, waiting, computing)
        axes.set(title=f"An epoch, {processes(size)}", xlabel="seconds")
    if tried:
        axes = panels[0, -1]
        loads, updates = ([getattr(line, part) for line in tried] for part in ("load", "update"))
        bars(axes, [line.name for line in tried], loads, updates)
        axes.set(title="A step with a random affine, 1 process", xlabel="seconds")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"drawn in {path}")


def bars(axes: Any, names: list[str], waiting: list[float], computing: list[float]) -> None:
    """Draw a bar for each name, the first on top: waiting, then computing."""
    axes.barh(names, waiting, color="tab:orange", label="waiting for data")
    drawn = axes.barh(names, computing, left=waiting, color="tab:blue", label="computing")
    totals = [f"{wait + rest:.3g}" for wait, rest in zip(waiting, computing, strict=True)]
    axes.bar_label(drawn, totals, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(axis="x", alpha=0.3)


def processes(size: int) -> str:
    """Return in words how many."""
    return "1 process" if size == 1 else f"{size} processes"


def not_negative(text: str) -> int:
    """Return the number on the command line, which must be 0 or more."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, but is {number}")
    return number


def arguments() -> argparse.ArgumentParser:
    """Return what can be said on the command line."""
    made = parser(__doc__, 5, "epochs of each contender, in fresh processes")
    add_samples(made, 12_000)
    made.add_argument(
        "--batch-size", type=positive, default=512, help="of all processes together (default: 512)"
    )
    made.add_argument(
        "--sizes", type=positive, nargs="+", default=[1, 2], help="processes (default: 1 2)"
    )
    made.add_argument(
        "--workers-table",
        type=not_negative,
        nargs="+",
        default=[],
        metavar="WORKERS",
        help="also compare so many workers, with a random affine (default: none)",
    )
    made.add_argument(
        "--epochs", type=positive, default=3, help="of the table of workers (default: 3)"
    )
    made.add_argument(
        "--test-samples",
        type=positive,
        default=10_000,
        help="on which the accuracy is measured (default: 10000)",
    )
    add_data_dir(made)
    return made


def main() -> None:
    """Measure at each size, and with each number of workers if asked; print the tables."""
    made = arguments()
    args = made.parse_args()
    images = mnist(args.data_dir, args.samples)
    if not images.directory.is_dir():
        sys.exit(f"MNIST must be in {images.directory}, but is not: see --data-dir")
    about = print_environment()
    tables: dict[str, list[Row]] = {}
    epochs: dict[int, list[Row]] = {}
    tried: list[Tried] = []
    what = f"{args.samples:,} images of MNIST, ConvNet, global batch {args.batch_size}, Adam"
    with tempfile.TemporaryDirectory() as cache:
        cache_dataset(images.read(None), cache)
        for size in args.sizes:
            title = f"{what}: {processes(size)}, {args.rounds} epochs of each"
            tables[title] = epochs[size] = compare(size, args, cache)
            print_table(title, "s", tables[title])
            print(f"losses of the cached loader and its limit at size {size}: equal to the bit")
        if args.workers_table:
            title = f"{what}, with a random affine: 1 process, {args.epochs} epochs"
            tried = try_workers(args, cache)
            print_workers(title, tried)
            tables[title] = [
                Row(f"{line.name}: {part}", [getattr(line, part)])
                for line in tried
                for part in ("load", "update", "total", "accuracy")
            ]
    if args.save:
        save(args.save, __file__, about, tables)
        try:
            draw(args.save / "epoch.png", epochs, tried)
        except ImportError:
            print("not drawn: matplotlib is not installed")


if __name__ == "__main__":
    main()
