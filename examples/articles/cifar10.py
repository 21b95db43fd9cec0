"""Train a ResNet on CIFAR-10 or a folder of images, in one process or in many.

    python examples/articles/cifar10.py --data digits  # one process
    torchrun --standalone --nproc-per-node=2 examples/articles/cifar10.py --data digits  # two (DDP)
    srun --ntasks=8 python examples/articles/cifar10.py  # a SLURM job
    python examples/articles/cifar10.py --data folder --data-dir images  # train/<class>/*.jpg
    python examples/articles/cifar10.py --cache  # no waiting

The run directory receives metrics.jsonl, TensorBoard events, curves.png, checkpoints, and at last
weights.pt, for others. A run that is stopped (SIGTERM, or SIGUSR2 as SLURM's --signal sends it)
saves and ends; started again with the same --run-dir it resumes, on any number of processes, as it
does after it was killed.
"""

import argparse
import itertools
import logging
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import curves
import torch
import torch.nn.functional as F
import torchvision
from batch_transforms import normalize, random_crop, random_flip
from example_data import Digits, downloaded, microbatch_size, whole_share
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import Dataset
from torchvision import datasets, transforms
from torchvision.models.resnet import BasicBlock, ResNet

import pardata
from pardata import (
    all_reduce_sum,
    backward,
    cache_dataset,
    load_weights,
    make_loader,
    progress,
    rank_zero_call,
    unwrap,
    wrap_model,
)

log = pardata.get_logger("cifar10")

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

# 1,437 digits make few steps, in which a ResNet-50 does not learn: more of them, of a small net.
OF_DIGITS = {"model": "resnet6", "epochs": 6, "batch_size": 32, "lr": 0.005}
OF_IMAGES = {"model": "resnet50", "epochs": 2, "batch_size": 128, "lr": 0.01}


def load_data(args: argparse.Namespace) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the training and the test set."""
    plain = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    flip = [transforms.RandomHorizontalFlip()] if may_flip(args) else []
    train = transforms.Compose([transforms.RandomCrop(32, padding=4), *flip, *plain])
    test = transforms.Compose(plain)
    if args.cache:
        train = test = None  # `transform_batch` does it
    if args.data == "digits":
        digits = partial(Digits, size=32, mode="RGB")
        sets = digits(train=True, transform=train), digits(train=False, transform=test)
    elif args.data == "folder":
        folder = Path(args.data_dir)
        sets = (
            datasets.ImageFolder(str(folder / "train"), transform=train),
            datasets.ImageFolder(str(folder / "test"), transform=test),
        )
    else:
        cifar = partial(datasets.CIFAR10, args.data_dir, download=True)
        sets = downloaded(
            lambda: (cifar(train=True, transform=train), cifar(train=False, transform=test))
        )
    return tuple(map(cache_dataset, sets)) if args.cache else sets


def may_flip(args: argparse.Namespace) -> bool:
    """Say whether a mirrored picture is still of its class: a digit becomes another sign."""
    return args.data != "digits"


def transform_batch(batch: Any, *, augment: bool, flip: bool) -> Any:
    """Do to a whole batch of cached images what `load_data` else has done to each."""
    images, labels = batch
    if augment:
        images = random_crop(images, padding=4)
        images = random_flip(images) if flip else images
    return normalize(images, MEAN, STD), labels


def make_loaders(args: argparse.Namespace) -> tuple[pardata.Loader, pardata.Loader]:
    """Return the loaders of the training and the test set."""
    train_set, test_set = load_data(args)
    options = {"seed": args.seed}
    if args.num_workers is not None:
        options["num_workers"] = args.num_workers
    train_options, test_options = {}, {}
    if args.cache:
        transform = partial(transform_batch, flip=may_flip(args))
        train_options["batch_transform"] = partial(transform, augment=True)
        test_options["batch_transform"] = partial(transform, augment=False)
    if args.cache or args.strategy == "exact":
        train_options["microbatch_size"] = microbatch_size(args.batch_size)
    return (
        make_loader(train_set, args.batch_size, shuffle=True, **options, **train_options),
        make_loader(test_set, 500, **options, **test_options),
    )


def make_network(name: str) -> nn.Module:
    """Return a ResNet of torchvision for ten classes, of which resnet6 is the first two stages."""
    if name != "resnet6":
        return getattr(torchvision.models, name)(num_classes=10)
    network = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    network.layer3, network.layer4, network.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 10)
    return network


def start_from(weights: str, model: nn.Module, restored: pardata.Restored) -> str | None:
    """Give `model` the weights of a file, unless its run was restored; return what is wrong.

    So a job that is started again by the same command resumes, and does not begin anew.
    """
    if restored:
        log.info("--checkpoint %s is not read: the run has its own", weights)
        return None
    without = int(all_reduce_sum(int(not Path(weights).is_file())))
    if without:  # on every rank the same: else those that have it would wait for the others
        size = pardata.world().size
        return f"--checkpoint {weights} is no file on {without} of {size} ranks: give its path"
    load_weights(model, weights)
    log.info("starting from the weights of %s", weights)
    return None


def train_epoch(
    model: nn.Module,
    loader: pardata.Loader,
    optimizer: optim.Optimizer,
    writer: pardata.MetricWriter,
    steps: Iterator[int],
    *,
    exact: bool,
) -> Iterator[int]:
    """Train to the end of the epoch; yield each step.

    Every ten, log the loss and where the time went.
    """
    model.train()
    bar = progress(loader, f"epoch {loader.epoch + 1}")
    before = {"seconds": 0.0, "wait_seconds": 0.0}
    for batch, step in zip(bar, steps, strict=False):
        optimizer.zero_grad()
        # The gradient of the mean over the global batch, however it is shared. Microbatches are
        # what makes a run exact; otherwise a share is faster as a whole.
        pieces = batch if exact else whole_share(batch)
        loss, accuracy = backward(model, mean_loss, pieces)
        optimizer.step()
        if step % 10 == 0:
            now = loader.stats()
            waited = now["wait_seconds"] - before["wait_seconds"]
            trained = now["seconds"] - before["seconds"] - waited
            before = now
            bar.show(loss=loss)
            times = {"time/data": waited, "time/train": trained}
            writer.write(step, {"train/loss": loss, "train/accuracy": accuracy, **times})
            text = "step %d  loss %.4f  accuracy %.3f  data %.2f s  training %.2f s"
            log.info(text, step, loss, accuracy, waited, trained)
        yield step


def mean_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss over the images of `batch`, and the accuracy."""
    images, labels = batch
    output = model(images)
    return F.cross_entropy(output, labels), (output.argmax(dim=1) == labels).float().mean()


@torch.no_grad()
def evaluate(model: nn.Module, loader: pardata.Loader) -> tuple[float, int, int]:
    """Return the loss, and how many of how many images are right, each counted once."""
    model.eval()
    totals = {"loss": torch.zeros((), device=pardata.world().device), "right": 0, "images": 0}
    for images, labels in loader:
        # A rank with no images runs the forward all the same: under fsdp it is collective.
        output = model(images)
        totals["loss"] += F.cross_entropy(output, labels, reduction="sum")
        totals["right"] += (output.argmax(dim=1) == labels).sum()
        totals["images"] += len(labels)
    totals = all_reduce_sum(totals)
    return float(totals["loss"]) / totals["images"], int(totals["right"]), totals["images"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        choices=["resnet6", "resnet18", "resnet50"],
        help="of torchvision; resnet6: stem and two blocks (default: resnet50, digits: resnet6)",
    )
    add(
        "--strategy",
        choices=["auto", "none", "dp", "ddp", "fsdp", "exact"],
        default="auto",
        help="how replicas are kept equal; auto: ddp in several processes, none in one; exact: "
        "bitwise identical at every number",
    )
    add(
        "--data",
        choices=["cifar10", "folder", "digits"],
        default="cifar10",
        help="cifar10 (downloaded); folder: train/<class>/ and test/<class>/ images of 32 x 32; "
        "digits: scikit-learn's, which need no network",
    )
    add("--data-dir", default="data", help="where the images are, or are downloaded to")
    add("--epochs", type=int, help="times through the training set (default: 2, digits: 6)")
    add(
        "--batch-size",
        type=int,
        help="images of one step, over all processes (default: 128, digits: 32)",
    )
    add("--lr", type=float, help="of SGD with momentum (default: 0.01, digits: 0.005)")
    add(
        "--cache",
        action="store_true",
        help="decode the images once, into $PARDATA_CACHE or else the user's cache directory, and "
        "transform whole batches",
    )
    add("--num-workers", type=int, help="loader workers of each process (default: by the cores)")
    add("--local-rank", help=argparse.SUPPRESS)  # the old torch.distributed.launch gives it
    add("--seed", type=int, default=0, help="of the weights, the order and the noise")
    add(
        "--checkpoint",
        metavar="FILE",
        help="start from the weights in this file, as weights.pt; a run that resumes (--run-dir) "
        "has its own",
    )
    add(
        "--run-dir",
        help="where results go, and from where to resume (default: runs/cifar10-<time>)",
    )
    add("--save-every", type=int, metavar="STEPS", help="also save within epochs, every so often")
    add("--requeue", type=int, default=0, metavar="CODE", help="exit status when stopped (0)")
    parser.set_defaults(**(OF_DIGITS if parser.parse_args().data == "digits" else OF_IMAGES))
    return parser.parse_args()


def main() -> int | str | None:
    args = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    with pardata.init() as world:
        if args.strategy in ("none", "dp") and world.size > 1:
            return f"--strategy {args.strategy} runs in one process, not in {world.size}: use ddp"
        default_dir = pardata.rank_zero_call(time.strftime, "runs/cifar10-%Y%m%d-%H%M%S")
        run_dir = Path(args.run_dir or default_dir)
        pardata.seed_everything(args.seed)
        train_loader, test_loader = make_loaders(args)
        model = wrap_model(make_network(args.model), args.strategy)
        optimizer = optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
        run = {"model": model, "optimizer": optimizer, "loader": train_loader}
        checkpointer = pardata.Checkpointer(run_dir / "checkpoints", asynchronous=True)
        restored = checkpointer.restore(**run)
        if args.checkpoint and (error := start_from(args.checkpoint, model, restored)):
            return error
        step = restored.step
        steps = itertools.count(step + 1)
        begin = time.perf_counter()
        metrics = pardata.MetricWriter(run_dir, after=step)
        with metrics as writer, pardata.StopSignal() as stop, checkpointer:
            for epoch in range(train_loader.epoch, args.epochs):
                log.info(
                    "epoch %d/%d  %d images a step, about %d on each rank",
                    epoch + 1,
                    args.epochs,
                    args.batch_size,
                    round(args.batch_size / world.size),
                )
                exact = args.strategy == "exact"
                for step in train_epoch(model, train_loader, optimizer, writer, steps, exact=exact):
                    if stop.agreed():
                        checkpointer.save(step, **run)
                        log.info("stopped; --run-dir %s resumes after step %d", run_dir, step)
                        return args.requeue
                    if args.save_every and step % args.save_every == 0:
                        checkpointer.save(step, **run)
                loss, right, images = evaluate(model, test_loader)
                accuracy = 100 * right / images
                log.info(
                    "test loss %.4f  accuracy %.2f %% (%d/%d images)", loss, accuracy, right, images
                )
                spent = train_loader.stats()
                log.info(
                    "epoch time %.2f s, of which waiting for data %.2f s",
                    spent["seconds"],
                    spent["wait_seconds"],
                )
                results = {"test/loss": loss, "test/accuracy": accuracy}
                times = {"time/epoch": spent["seconds"], "time/waiting": spent["wait_seconds"]}
                writer.write(step, {**results, **times})
                checkpointer.save(step, **run)
        log.info("total training time %.1f s", time.perf_counter() - begin)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(unwrap(model), options=whole)
        rank_zero_call(torch.save, weights, run_dir / "weights.pt")
        if world.is_main:
            log.info("weights in %s, curves in %s", run_dir / "weights.pt", curves.draw(run_dir))
    return None


if __name__ == "__main__":
    sys.exit(main())
