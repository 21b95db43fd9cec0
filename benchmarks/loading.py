"""How many samples a second a loader yields, in one process.

    python benchmarks/loading.py
    python benchmarks/loading.py --rounds 3 --tables mnist
    python benchmarks/loading.py --cifar-dir "$TMPDIR/cifar"     # with train/<class>/*.jpg

Batches of 256 of MNIST, plain and with a random affine, and of CIFAR-10's JPEG files with crop and
flip, all normalized: by DataLoader, by those that libraries make of it, and by pardata; with
nothing cached, and from cache_dataset with the same done to whole batches by the functions of
articles/batch_transforms.py. The limit is index_select from memory and those functions, alone.
Every loader has begun, and its workers are ahead as far as they go, before it is measured; epochs
follow one another. The allocator is as init tunes it, for all. All yield the same, save for the
random numbers, which is checked. Needs torchvision; other libraries take part where installed.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from _images import (
    Images,
    add_cifar_dir,
    add_data_dir,
    add_samples,
    cifar,
    mnist,
    mnist_affine,
    normalize,
)
from _measure import Report, Row, alternate, parser, positive, require
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pardata import Microbatches, cache_dataset, init, make_loader

BATCH = 256

Make = Callable[[], Iterable[Any]]

DATA_LOADER = "DataLoader, 0 workers"
TWO_WORKERS = "DataLoader, 2 workers"
LIMIT = "limit: index_select and arithmetic"
AS_IT_IS = "pardata, cached, as it is"
CACHED = "pardata, cached, batch_transform"

TABLES = ("mnist", "affine", "cifar")


def peers(dataset: Dataset[Any]) -> dict[str, Make]:
    """Return the loaders of the libraries that are installed; say which are not."""
    found: dict[str, Make] = {}
    by_hand = partial(DataLoader, dataset, BATCH, shuffle=True, drop_last=True)
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415  # optional
    except ImportError:
        print("StatefulDataLoader takes no part: torchdata is not installed")
    else:
        stateful = partial(StatefulDataLoader, dataset, BATCH, shuffle=True, drop_last=True)
        workers = partial(stateful, num_workers=2, persistent_workers=True)
        found["StatefulDataLoader, 0 workers"] = stateful
        found["StatefulDataLoader, 2 workers"] = workers
    try:
        from accelerate import Accelerator  # noqa: PLC0415  # optional
    except ImportError:
        print("Accelerate takes no part: accelerate is not installed")
    else:
        found["Accelerate, 0 workers"] = lambda: Accelerator(cpu=True).prepare(by_hand())
    try:
        from lightning_fabric import Fabric  # noqa: PLC0415  # optional
    except ImportError:
        print("Fabric takes no part: lightning-fabric is not installed")
    else:
        fabric = Fabric(accelerator="cpu", devices=1)
        found["Fabric, 0 workers"] = lambda: fabric.setup_dataloaders(by_hand())
    return found


def one_by_one(images: Images) -> dict[str, Make]:
    """Return the loaders that read one sample at a time."""
    dataset = images.one_by_one()
    by_hand = partial(DataLoader, dataset, BATCH, shuffle=True, drop_last=True)
    ours = partial(make_loader, dataset, BATCH, shuffle=True, seed=0)
    not_seeded = partial(ours, reproducible=False)
    return {
        DATA_LOADER: by_hand,
        "DataLoader, 1 worker": partial(by_hand, num_workers=1, persistent_workers=True),
        TWO_WORKERS: partial(by_hand, num_workers=2, persistent_workers=True),
        **peers(dataset),
        "pardata, 0 workers": partial(ours, num_workers=0),
        "pardata, 2 workers": partial(ours, num_workers=2),
        "pardata, 0 workers, reproducible=False": partial(not_seeded, num_workers=0),
        "pardata, 2 workers, reproducible=False": partial(not_seeded, num_workers=2),
    }


def by_batches(images: Images, cached: Any) -> dict[str, Make]:
    """Return the loaders that read whole batches."""
    ours = partial(make_loader, cached, BATCH, shuffle=True, seed=0)
    # A random transform gets pieces that are the same at every world size: here the whole batch.
    pieces = {} if images.augment_batch is None else {"microbatch_size": BATCH}
    return {
        LIMIT: partial(Limit, images, cached),
        AS_IT_IS: ours,
        CACHED: partial(ours, batch_transform=images.transform, **pieces),
    }


class Limit:
    """Batches with nothing around them: rows of tensors in memory, in an order drawn before."""

    def __init__(self, images: Images, cached: Any) -> None:
        count = len(cached)
        self._tensors = next(iter(make_loader(cached, count, num_workers=0)))
        self._order = torch.randperm(count).split(BATCH)[: count // BATCH]
        self._transform = images.transform

    def __iter__(self) -> Iterator[Any]:
        for rows in self._order:
            yield self._transform([part.index_select(0, rows) for part in self._tensors])


class Stream:
    """A loader's batches, epoch after epoch."""

    def __init__(self, make: Make, batches: int) -> None:
        self._loader = make()
        self._count = batches
        # Two workers have two batches each ready, where DataLoader lets them wait.
        self._ahead = 5
        self._batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self._loader

    def form(self) -> tuple[object, ...]:
        """Return what a batch is made of."""
        batch = next(self._batches)
        images, labels = batch[0] if isinstance(batch, Microbatches) else batch
        return images.shape, images.dtype, labels.shape, labels.dtype

    def rate(self) -> float:
        """Return the samples a second of the next batches."""
        for _ in islice(self._batches, self._ahead):
            pass
        start = time.perf_counter()
        for _ in islice(self._batches, self._count):
            pass
        return self._count * BATCH / (time.perf_counter() - start)


def compare(name: str, images: Images, args: argparse.Namespace, directory: str) -> list[Row]:
    """Measure all loaders in turns; return a row for each comparison."""
    cached = cache_dataset(images.read(None), directory)
    check_cached(images, cached)
    streams = {
        contender: Stream(make, args.batches) for contender, make in one_by_one(images).items()
    }
    for contender, make in by_batches(images, cached).items():
        streams[contender] = Stream(make, args.batches * args.more)
    check_forms(streams)
    rates = alternate({who: stream.rate for who, stream in streams.items()}, args.rounds)
    rows = [Row(DATA_LOADER, rates[DATA_LOADER])]
    for who in rates:
        if who == CACHED:
            rows += [
                Row.compare(rates, who, DATA_LOADER, f"cached, {name}"),
                Row.compare(rates, who, LIMIT, f"of the limit, {name}"),
            ]
        elif who.startswith("pardata, 0"):
            rows.append(Row.compare(rates, who, DATA_LOADER, f"one by one, {name}"))
        elif who.startswith("pardata, 2"):
            rows.append(Row.compare(rates, who, TWO_WORKERS, f"one by one, {name}"))
        elif who != DATA_LOADER:
            rows.append(Row.compare(rates, who, DATA_LOADER))
    return rows


def check_cached(images: Images, cached: Any) -> None:
    """Stop where a batch that was cached and normalized at once is not that of single images."""
    expected, labels = next(iter(DataLoader(images.without_augmenting(), BATCH)))
    found, found_labels = next(iter(make_loader(cached, BATCH)))
    ours: Tensor = normalize(found, images.mean, images.std)
    same = torch.allclose(ours, expected, atol=1e-5) and torch.equal(found_labels, labels)
    require(holds=same, what="the cached images are others")


def check_forms(streams: dict[str, Stream]) -> None:
    """Stop where a loader yields batches of another form."""
    forms = {who: stream.form() for who, stream in streams.items() if who != AS_IT_IS}
    for who, form in forms.items():
        expected = forms[DATA_LOADER]
        require(holds=form == expected, what=f"{who} yields {form}, and others {expected}")


def arguments() -> argparse.ArgumentParser:
    """Return what can be said on the command line."""
    made = parser(__doc__, 9, "measurements of each loader")
    made.add_argument(
        "--tables", nargs="+", choices=TABLES, default=list(TABLES), help="which (default: all)"
    )
    made.add_argument("--batches", type=positive, default=20, help="of a measurement (default: 20)")
    made.add_argument(
        "--more",
        type=positive,
        default=40,
        help="times as many batches where they are read whole (default: 40)",
    )
    add_samples(made)
    add_data_dir(made)
    add_cifar_dir(made)
    return made


def main() -> None:
    """Measure the loaders of each kind of images, and print the tables."""
    made = arguments()
    args = made.parse_args()
    if args.samples is not None and args.samples < BATCH:
        made.error(f"--samples must be {BATCH} or more, for one batch, but is {args.samples}")
    report = Report(__file__, args.save)
    with init(device="cpu"):  # as a user would
        measure(args, report)
    if report.tables:
        report.save()


def measure(args: argparse.Namespace, report: Report) -> None:
    """Measure the loaders of each kind of images that is there."""
    every = {"mnist": (mnist, "data"), "affine": (mnist_affine, "data"), "cifar": (cifar, "cifar")}
    for name in args.tables:
        kind, where = every[name]
        images = kind(vars(args)[f"{where}_dir"], args.samples)
        if not images.directory.is_dir():
            print(f"\n{images.title}: left out without {images.directory}; see --{where}-dir")
            continue
        with tempfile.TemporaryDirectory() as directory:
            title = f"{images.title}: batches of {BATCH}, {args.rounds} measurements of each loader"
            report.add(title, "samples/s", compare(name, images, args, directory))
        print("batches of all loaders: of the same form; cached images: the same", flush=True)


if __name__ == "__main__":
    main()
