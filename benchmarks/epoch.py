"""How long an epoch of training on MNIST takes on CPUs, and how much of that is waiting for data.

    python benchmarks/epoch.py
    python benchmarks/epoch.py --rounds 1 --samples 60000
    python benchmarks/epoch.py --save

The net of articles/mnist.py, global batch 512, Adam, in one process and in two that share the
cores. The tutorial's way, DistributedSampler, DistributedDataParallel and DataLoader without
workers; pardata, plain and from cache_dataset; and the limit, the same steps as those of the cached
loader with every batch ready in memory. The latter three with the allocator as it is and as init
tunes it, which lasts for the life of a process: so each measurement takes fresh ones. The losses of
the cached loader and of its limit must be equal to the bit. Needs torchvision.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _images import Images, add_data_dir, add_samples, mnist
from _measure import Report, Row, alternate, parser, positive, require, usable_cores
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
OF_TUTORIAL = {1: "epoch, 1 process", 2: "epoch, 2 processes"}
OF_LIMIT = "epoch, of the limit"
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
    """

    source: str
    images: Images
    cache: str
    batch_size: int
    tune_cpu: bool = False


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
    torch.distributed.barrier()
    start = time.perf_counter()
    losses = [step(batch) for batch in batches]
    seconds = time.perf_counter() - start
    # A rank that waits for the other does so in its step.
    spent = {"seconds": seconds, "waiting": seconds - step.seconds}
    return {
        "losses": pardata.all_gather(losses),
        "spent": pardata.all_reduce_mean(spent),
        "steps": len(losses),
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


def tutorial(how: Training) -> Iterable[Batch]:
    """Return the batches of an epoch as tutorials read them."""
    dataset = how.images.one_by_one()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    share = how.batch_size // torch.distributed.get_world_size()
    return DataLoader(dataset, share, sampler=sampler, drop_last=True)


def plain(how: Training) -> Iterable[Batch]:
    """Return the batches of pardata with nothing cached."""
    dataset = how.images.one_by_one()
    return make_loader(dataset, how.batch_size, shuffle=True, seed=0, num_workers=0)


def cached(how: Training) -> Iterable[Batch]:
    """Return the batches of pardata from a cache that is there."""
    dataset = cache_dataset(how.images.read(None), how.cache)
    transform = how.images.transform
    return make_loader(dataset, how.batch_size, shuffle=True, seed=0, batch_transform=transform)


def ready(how: Training) -> Iterable[Batch]:
    """Return what `cached` yields, read before."""
    return list(cached(how))


SOURCES = {TUTORIAL: tutorial, PLAIN: plain, CACHED: cached, READY: ready}


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
        target = OF_TUTORIAL.get(size, "") if tuning == TUNED else ""
        rows += [
            Row.compare(seconds, f"{PLAIN}, {tuning}", TUTORIAL),
            Row.compare(seconds, ours, TUTORIAL, target),
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


def main() -> None:
    """Measure at each size, and print the tables."""
    made = parser(__doc__, 5, "epochs of each contender, in fresh processes")
    add_samples(made, 12_000)
    made.add_argument(
        "--batch-size", type=positive, default=512, help="of all processes together (default: 512)"
    )
    made.add_argument(
        "--sizes", type=positive, nargs="+", default=[1, 2], help="processes (default: 1 2)"
    )
    add_data_dir(made)
    args = made.parse_args()
    images = mnist(args.data_dir, args.samples)
    if not images.directory.is_dir():
        sys.exit(f"MNIST must be in {images.directory}, but is not: see --data-dir")
    report = Report(__file__, args.save)
    what = f"{args.samples:,} images of MNIST, ConvNet, global batch {args.batch_size}, Adam"
    with tempfile.TemporaryDirectory() as cache:
        cache_dataset(images.read(None), cache)
        for size in args.sizes:
            title = f"{what}: {size} process(es), {args.rounds} epochs of each"
            report.add(title, "s", compare(size, args, cache))
            print(f"losses of the cached loader and its limit at size {size}: equal to the bit")
    report.save()


if __name__ == "__main__":
    main()
