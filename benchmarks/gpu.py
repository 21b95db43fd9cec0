"""What training on a GPU costs here, next to what people write by hand.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --data-dir data --cifar-dir data/cifar --save
    python benchmarks/gpu.py --device cpu        # a dry run: every part, at its smallest

(a) Ten epochs of LeNet on MNIST with a random affine: DataLoader with 0 and 4 workers, of which one
epoch is measured and counted ten times, and pardata from cache_dataset, transforms on the GPU.
(b) ResNet-50 on CIFAR-10, bf16 and channels-last: pardata, the same steps with all batches on the
GPU already, and DistributedDataParallel with DataLoader; and the share of the time spent waiting.
(c) The README's loop over DistributedDataParallel by hand: a small MLP, ResNet-18, a transformer of
12 layers. (d) "exact" over "ddp" with the same microbatches, ResNet-18. (e) Kernels launched, and
waits of the host for the GPU, in a step, as the profiler counts them.

One process, in a group of one, on the accelerator of `init`; at most 8 minutes. Where there is no
MNIST or CIFAR-10, images are made up, which is said: times then mean the same, losses nothing. Each
number is of some rounds, in which the contenders take turns. Needs torchvision; draws if matplotlib
is there.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from _gpu_loops import (
    Block,
    Transformer,
    bf16_loss,
    by_hand,
    counted,
    lenet,
    mlp,
    moved,
    readme,
    ready,
    timed,
)
from _images import Images, add_cifar_dir, add_data_dir, cifar, mnist_affine
from _measure import Reach, Row, alternate, parser, print_environment, print_table, save
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.models import resnet18, resnet50

import pardata
from pardata import cache_dataset, make_loader, seed_everything, world

HAND, OURS, READY = "DDP by hand", "README's loop", "limit: all batches on the GPU"
WORKERS = "DataLoader, {} workers"
CACHED = "pardata, cached, batch_transform"
AS_FAST, EXACT = Reach(1.02), Reach(1.5)
TEN_EPOCHS, WAITING, OF_READY = Reach(3.0), Reach(0.03), Reach(0.97, at_least=True)


class Sizes(NamedTuple):
    """How much is done: of a batch, of the datasets, and of a block of steps."""

    batch: int
    samples: int | None
    steps: int
    blocks: int
    workers: int
    tokens: int


EPOCHS = 10
FULL, DRY = Sizes(512, None, 20, 10, 8, 128), Sizes(16, 32, 1, 1, 1, 4)


def nets(sizes: Sizes) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]]:
    """Return, by name, how a net is made, the shape of a sample, and of how many a batch is."""
    return {
        "small MLP": (mlp, (64,), 32),
        "ResNet-18": (partial(resnet18, num_classes=10), (3, 32, 32), sizes.batch // 2),
        "transformer": (Transformer, (sizes.tokens, 512), 32 if sizes is FULL else 2),
    }


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
    return {title + ", s": [*rows, Row(f"{CACHED}, in all", times[CACHED], reach=TEN_EPOCHS)]}


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
    share = [Row(f"{CACHED}: share of the time waiting", waits, reach=WAITING)]
    return {title + ", images/s": rows, title + ", waiting": share}


def loops(args: argparse.Namespace, sizes: Sizes, _: Path) -> dict[str, list[Row]]:
    """Measure part (c)."""
    tables = {}
    for name, (net, shape, batch) in nets(sizes).items():
        batches = ready(shape, batch, sizes.steps, None)
        blocks = {HAND: by_hand(net()), f"{HAND} again": by_hand(net()), OURS: readme(net())}
        work = {who: partial(timed, partial(block, batches)) for who, block in blocks.items()}
        alternate(work, 1)  # DDP arranges its buckets after the first step
        times = alternate(work, sizes.blocks * args.rounds)
        each = {who: [1e3 * t / sizes.steps for t in found] for who, found in times.items()}
        again = Row.compare(each, f"{HAND} again", HAND)
        rows = [Row(HAND, each[HAND]), again, Row.compare(each, OURS, HAND, AS_FAST)]
        tables[f"(c) {name}, a step, ms"] = rows
    return tables


def in_microbatches(sizes: Sizes) -> list[Any]:
    """Return batches for ResNet-18, in four microbatches each."""
    batch = sizes.batch // 2
    return ready((3, 32, 32), batch, sizes.steps, batch // 4)


def choose_kernels(*, deterministic: bool) -> None:
    """Let PyTorch and cuDNN choose deterministic kernels only, or any, as "ddp" does."""
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic


def exact(args: argparse.Namespace, sizes: Sizes, _: Path) -> dict[str, list[Row]]:
    """Measure part (d)."""
    batches, net = in_microbatches(sizes), partial(resnet18, num_classes=10)
    seed_everything(0, deterministic=True)
    blocks = {name: readme(net(), strategy=name) for name in ("ddp", "exact")}

    def step(name: str) -> float:
        choose_kernels(deterministic=name == "exact")
        return 1e3 * timed(partial(blocks[name], batches)) / sizes.steps

    work = {name: partial(step, name) for name in blocks}
    alternate(work, 1)
    times = alternate(work, args.rounds)
    choose_kernels(deterministic=False)
    rows = [Row("ddp", times["ddp"]), Row.compare(times, "exact", "ddp", EXACT)]
    return {"(d) ResNet-18 in microbatches, a step, ms": rows}


def counts(args: argparse.Namespace, sizes: Sizes, _: Path) -> dict[str, list[Row]]:  # noqa: ARG001  # as the others
    """Count for part (e): the profiler sees no time that would mean anything."""
    net, shape, batch = nets(sizes)["ResNet-18"]
    whole = ready(shape, batch, sizes.steps, None)
    loops = {HAND: (by_hand(net()), whole), OURS: (readme(net()), whole)}
    loops[f"{OURS}, Microbatches"] = readme(net()), in_microbatches(sizes)
    found = {name: counted(*loop) for name, loop in loops.items()}
    launches = [Row(name, [count]) for name, (count, _) in found.items()]
    waits = [Row(name, [count], reach=Reach(0)) for name, (_, count) in found.items()]
    return {
        "(e) ResNet-18, a step, kernels": launches,
        "(e) ResNet-18, a step, waits of the host": waits,
    }


PARTS = {"a": ten_epochs, "b": large_net, "c": loops, "d": exact, "e": counts}


def draw(folder: Path, tables: dict[str, list[Row]], device: str) -> None:
    """Draw the seconds of part (a), and all ratios for which there is a number to reach."""
    import matplotlib as mpl  # noqa: PLC0415  # only to draw

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  # after the choice of the backend

    seconds = {r.name: r.values for t, rows in tables.items() if t[1] == "a" for r in rows[:3]}
    ratios = {
        f"{title.split(',')[0]}: {row.name}, to reach {row.reach}": row.ratios
        for title, rows in tables.items()
        for row in rows
        if row.ratios and row.reach
    }
    title = next((t for t in tables if t[1] == "a"), "").removeprefix("(a) ").removesuffix(", s")
    times, over = ("times", title, "seconds", seconds), ("ratios", "Ratios", "ratio", ratios)
    for name, above, label, found in (times, over):
        if not found:  # these parts were not asked for
            continue
        figure, axes = plt.subplots(figsize=(9, 1 + 0.5 * len(found)), layout="constrained")
        drawn = axes.barh(list(found), [median(values) for values in found.values()])
        axes.bar_label(drawn, fmt="%.3g", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.12)  # room for the numbers
        axes.set(xlabel=label)
        figure.suptitle(f"{above} ({device})", fontsize="medium")
        figure.savefig(folder / f"gpu-{name}.png", dpi=120)
        plt.close(figure)


def not_measured(row: Row) -> Row:
    """Return a row of a dry run, which reaches nothing."""
    return row if row.reach is None else replace(row, reach=replace(row.reach, is_dry=True))


def main() -> None:
    """Measure each part and print its tables."""
    made = parser(__doc__, 2, "times that contenders take turns; ten times as often in (c)")
    made.add_argument("--device", help="(default: the accelerator that is here)")
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(all)")
    add_data_dir(made)
    add_cifar_dir(made)
    args = made.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for (d); cuBLAS reads it once
    about, tables = print_environment(), {}
    with tempfile.TemporaryDirectory() as folder, pardata.init(device=args.device) as here:
        is_gpu, of_kind = here.device.type != "cpu", torch.get_device_module(here.device)
        about["device"] = of_kind.get_device_name() if is_gpu else "CPU: a dry run"
        print(f"device: {about['device']}", flush=True)
        for part in args.parts:
            for title, rows in PARTS[part](args, FULL if is_gpu else DRY, Path(folder)).items():
                tables[title] = rows if is_gpu else [not_measured(row) for row in rows]
                print_table(title, "", tables[title])
    if args.save:
        save(args.save, __file__, about, tables)
        try:
            draw(args.save, tables, about["device"])
        except ImportError:
            print("not drawn: matplotlib is not installed")


if __name__ == "__main__":
    main()
