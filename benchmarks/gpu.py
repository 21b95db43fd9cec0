"""What training on a GPU costs here, next to what people write by hand.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --data-dir data --cifar-dir data/cifar --save
    python benchmarks/gpu.py --device cpu        # a dry run: every part, at its smallest

(a) Ten epochs of LeNet on MNIST with a random affine: DataLoader with 0 and 4 workers, of which one
epoch is measured and counted ten times, and pardata from cache_dataset, transforms on the GPU.
(b) ResNet-50 on CIFAR-10, bf16 and channels-last: pardata, the same steps with all batches on the
GPU already, and DistributedDataParallel with DataLoader; and the share of the time spent waiting.
A step, and "exact", are measured by gpu_first_day.py.

One process, in a group of one, on the accelerator of `init`; at most 8 minutes. Where there is no
MNIST or CIFAR-10, images are made up, which is said: times then mean the same, losses nothing. Each
number is of some rounds, in which the contenders take turns. Needs torchvision.
"""

import argparse
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _gpu_loops import bf16_loss, by_hand, lenet, moved, readme, ready, timed
from _images import Images, add_cifar_dir, add_data_dir, cifar, mnist_affine
from _measure import Report, Row, alternate, parser
from _nets import Block
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.models import resnet50

import pardata
from pardata import cache_dataset, make_loader, world

HAND, READY = "DDP by hand", "limit: all batches on the GPU"
WORKERS = "DataLoader, {} workers"
CACHED = "pardata, cached, batch_transform"
TEN_EPOCHS, WAITING = "ten epochs of LeNet, s", "share of the time waiting"
OF_READY = "of all batches on the GPU"


class Sizes(NamedTuple):
    """How much is done: of a batch, of the datasets, and by how many workers."""

    batch: int
    samples: int | None
    workers: int


EPOCHS = 10
FULL, DRY = Sizes(512, None, 8), Sizes(16, 32, 1)


def data_loader(images: Images, batch: int, workers: int) -> DataLoader[Any]:
    """Return the loader that people write."""
    return DataLoader(
        images.one_by_one(),
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=world().device.type != "cpu",
        persistent_workers=workers > 0,
    )


def there(images: Images, shape: tuple[int, ...], samples: int | None) -> Images:
    """Return the images, or made-up ones, of the same shape, where they are not there."""
    if images.directory.is_dir():
        return images
    print(f"{images.title} is not in {images.directory}: these images are made up")
    count = samples or 50_000
    return replace(images, title="made-up images", read=lambda t: FakeData(count, shape, 10, t))


def pieces(images: Images, batch: int, cache: Path) -> Any:
    """Return the loader of pardata, from the cache."""
    data = cache_dataset(images.read(None), cache)
    whole: dict[str, Any] = {"shuffle": True, "microbatch_size": batch, "seed": 0}
    return make_loader(data, batch, batch_transform=images.transform, **whole)


def ten_epochs(args: argparse.Namespace, sizes: Sizes, folder: Path) -> dict[str, list[Row]]:
    """Measure part (a)."""
    images = there(mnist_affine(args.data_dir, sizes.samples), (1, 28, 28), sizes.samples)
    loader = pieces(images, sizes.batch, folder / "mnist")

    def hand(workers: int) -> float:
        batches = moved(data_loader(images, sizes.batch, workers))
        return EPOCHS * timed(partial(by_hand(lenet()), batches))

    def ours() -> float:
        block = readme(lenet())
        return timed(lambda: [block(loader) for _ in range(EPOCHS)])

    by_hand(lenet())(ready((1, 28, 28), sizes.batch, 2, None))  # cuDNN and the allocator begin
    names = {WORKERS.format(n): partial(hand, n) for n in (0, 4)}
    first = next(iter(names))
    times = alternate({**names, CACHED: ours}, args.rounds)
    rows = [Row(first, times[first]), *(Row.compare(times, n, first) for n in list(times)[1:])]
    title = f"(a) {EPOCHS} epochs of LeNet: {images.title}, batch {sizes.batch}"
    return {title + ", s": [*rows, Row(f"{CACHED}, in all", times[CACHED], target=TEN_EPOCHS)]}


def large_net(args: argparse.Namespace, sizes: Sizes, folder: Path) -> dict[str, list[Row]]:
    """Measure part (b)."""
    images = there(cifar(args.cifar_dir, sizes.samples), (3, 32, 32), sizes.samples)
    loader = pieces(images, sizes.batch, folder / "cifar")
    kept = list(loader)
    waits: list[float] = []

    def net() -> nn.Module:
        made: nn.Module = resnet50(num_classes=10).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs have it not
        return made

    def rate(block: Block, batches: Iterable[Any], *, is_ours: bool = False) -> float:
        seconds = timed(partial(block, batches))
        if is_ours:
            waits.append(loader.stats()["wait_share"])
        return len(kept) * sizes.batch / seconds

    hand, ours = by_hand(net(), bf16_loss), readme(net(), bf16_loss)
    for block, batches in ((hand, map(list, kept[0])), (ours, kept[:1])):
        block(batches)
    by_workers = data_loader(images, sizes.batch, sizes.workers)
    name = f"{HAND}, {WORKERS.format(sizes.workers)}"
    rates = alternate(
        {
            name: lambda: rate(hand, moved(by_workers)),
            READY: partial(rate, ours, kept),
            CACHED: lambda: rate(ours, loader, is_ours=True),
        },
        args.rounds,
    )
    rows = [Row(name, rates[name]), Row.compare(rates, READY, name)]
    rows += [Row.compare(rates, CACHED, READY, OF_READY), Row.compare(rates, CACHED, name)]
    title = f"(b) ResNet-50, bf16: {images.title}, batch {sizes.batch}"
    share = [Row(f"{CACHED}: share of the time waiting", waits, target=WAITING)]
    return {title + ", images/s": rows, title + ", waiting": share}


PARTS = {"a": ten_epochs, "b": large_net}


def not_measured(row: Row) -> Row:
    """Return a row of a dry run, without its target."""
    return replace(row, target="")


def main() -> None:
    """Measure each part and print its tables."""
    made = parser(__doc__, 2, "times that contenders take turns")
    made.add_argument("--device", help="(default: the accelerator that is here)")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    add_data_dir(made)
    add_cifar_dir(made)
    args = made.parse_args()
    report = Report(__file__, args.save)
    with tempfile.TemporaryDirectory() as folder, pardata.init(device=args.device) as here:
        is_gpu, of_kind = here.device.type != "cpu", torch.get_device_module(here.device)
        report.about["device"] = of_kind.get_device_name() if is_gpu else "CPU: a dry run"
        print(f"device: {report.about['device']}", flush=True)
        for part in args.parts:
            for title, rows in PARTS[part](args, FULL if is_gpu else DRY, Path(folder)).items():
                report.add(title, "", rows if is_gpu else map(not_measured, rows))
    report.save()


if __name__ == "__main__":
    main()
