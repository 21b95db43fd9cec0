"""Train a small convolutional net on handwritten digits, in one process or in many.

    python examples/articles/mnist.py --data digits  # one process
    torchrun --standalone --nproc-per-node=2 examples/articles/mnist.py --data digits  # two (DDP)
    python examples/articles/mnist.py --data digits --exact-check 3  # bitwise identical at 3?
    python examples/articles/mnist.py --data mnist --cache --augment  # no waiting
    srun --ntasks=8 python examples/articles/mnist.py --data mnist  # a SLURM job
    python examples/articles/mnist.py --data mnist --strategy dp --device-ids 0 1  # DataParallel

The run directory receives metrics.jsonl, TensorBoard events, curves.png and checkpoints. A run that
is stopped (SIGTERM, or SIGUSR2 as SLURM's --signal sends it) saves and ends; started again with the
same --run-dir it resumes, on any number of processes, as it does after it was killed. The last line
is a fingerprint of the trained weights: with --strategy exact it is the same on any number.

Dropout draws other numbers in each process, so losses on 1 and on 2 processes differ; --strategy
exact is bitwise identical on any number.
"""

import argparse
import itertools
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import curves
import torch
import torch.nn.functional as F
from batch_transforms import normalize, random_affine
from example_data import Digits, downloaded, microbatch_size, whole_share
from torch import nn, optim
from torch.utils.data import Dataset
from torchvision import datasets, transforms

import pardata
from pardata import (
    all_reduce_sum,
    backward,
    cache_dataset,
    make_loader,
    progress,
    wrap_model,
)

log = pardata.get_logger("mnist")

MEAN, STD = (0.1307,), (0.3081,)
AFFINE = {"degrees": 10, "translate": (0.1, 0.1), "scale": (0.9, 1.1)}


class ConvNet(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self, *, dropout: bool = True) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25 if dropout else 0.0),
        )
        self.classifier = nn.Sequential(
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Dropout(0.5 if dropout else 0.0),
            nn.Linear(128, 10),
        )
        self.show_shapes = False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return log probabilities, images x 10, of gray images of 28 x 28."""
        output = F.log_softmax(self.classifier(self.features(images).flatten(1)), dim=1)
        if self.show_shapes:
            print(f"inside the model: {tuple(images.shape)} -> {tuple(output.shape)}", flush=True)
        return output


def load_data(args: argparse.Namespace) -> tuple[Dataset[Any], Dataset[Any]]:
    """Return the training and the test set."""
    plain = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    if args.double:
        plain.append(transforms.ConvertImageDtype(torch.float64))
    affine = [transforms.RandomAffine(**AFFINE)] if args.augment else []
    train, test = transforms.Compose([*affine, *plain]), transforms.Compose(plain)
    if args.cache:
        train = test = None  # `transform_batch` does it
    if args.data == "digits":
        digits = partial(Digits, size=28, mode="L")
        sets = digits(train=True, transform=train), digits(train=False, transform=test)
    else:
        mnist = partial(datasets.MNIST, args.data_dir, download=True)
        sets = downloaded(
            lambda: (mnist(train=True, transform=train), mnist(train=False, transform=test))
        )
    return tuple(map(cache_dataset, sets)) if args.cache else sets


def transform_batch(batch: Any, *, augment: bool, double: bool) -> Any:
    """Do to a whole batch of cached images what `load_data` else has done to each."""
    images, labels = batch
    images = normalize(random_affine(images, **AFFINE) if augment else images, MEAN, STD)
    return images.double() if double else images, labels


def make_loaders(args: argparse.Namespace) -> tuple[pardata.Loader, pardata.Loader]:
    """Return the loaders of the training and the test set."""
    train_set, test_set = load_data(args)
    batch_size = args.batch_size or {"mnist": 512, "digits": 64}[args.data]
    options = {"seed": args.seed}
    if args.num_workers is not None:
        options["num_workers"] = args.num_workers
    train_options, test_options = {}, {}
    if args.cache:
        transform = partial(transform_batch, double=args.double)
        train_options["batch_transform"] = partial(transform, augment=args.augment)
        test_options["batch_transform"] = partial(transform, augment=False)
    if args.strategy == "exact" or (args.cache and args.augment):
        train_options["microbatch_size"] = args.microbatch_size or microbatch_size(batch_size)
    return (
        make_loader(train_set, batch_size, shuffle=True, **options, **train_options),
        make_loader(test_set, 1000, **options, **test_options),
    )


def train_epoch(
    model: nn.Module,
    loader: pardata.Loader,
    optimizer: optim.Optimizer,
    writer: pardata.MetricWriter,
    steps: Iterator[int],
    *,
    args: argparse.Namespace,
) -> Iterator[int]:
    """Train to the end of the epoch, logging every `args.log_interval` steps; yield each step."""
    model.train()
    bar = progress(loader, f"epoch {loader.epoch + 1}")
    for batch, step in zip(bar, steps, strict=False):
        optimizer.zero_grad()
        # The gradient of the mean over the global batch, however it is shared. Microbatches are
        # what makes a run exact; otherwise a share is faster as a whole.
        pieces = batch if args.strategy == "exact" else whole_share(batch)
        loss, accuracy = backward(model, mean_loss, pieces)
        optimizer.step()
        if step % args.log_interval == 0:
            bar.show(loss=loss)
            writer.write(step, {"train/loss": loss, "train/accuracy": accuracy})
            log.info("step %d  loss %.4f  accuracy %.3f", step, loss, accuracy)
        yield step


def mean_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss over the images of `batch`, and the accuracy."""
    images, labels = batch
    output = model(images)
    if model.show_shapes:
        print(f"outside the model: {tuple(images.shape)} -> {tuple(output.shape)}", flush=True)
        model.show_shapes = False  # reaches the module, whatever wraps it
    return F.nll_loss(output, labels), (output.argmax(dim=1) == labels).float().mean()


@torch.no_grad()
def evaluate(model: nn.Module, loader: pardata.Loader) -> dict[str, Any]:
    """Return loss and accuracies over the whole test set, each image counted once."""
    model.eval()
    device = pardata.world().device
    loss = torch.zeros((), device=device)
    correct = torch.zeros(10, dtype=torch.int64, device=device)
    count = torch.zeros(10, dtype=torch.int64, device=device)
    for images, labels in loader:
        # A rank with no images runs the forward all the same: under fsdp it is collective.
        output = model(images)
        loss += F.nll_loss(output, labels, reduction="sum")
        right = labels[output.argmax(dim=1) == labels]
        correct += torch.bincount(right, minlength=10)
        count += torch.bincount(labels, minlength=10)
    totals = all_reduce_sum({"loss": loss, "correct": correct, "count": count})
    images = int(totals["count"].sum())
    return {
        "loss": float(totals["loss"]) / images,
        "correct": int(totals["correct"].sum()),
        "images": images,
        "of class": (100 * totals["correct"] / totals["count"].clamp(min=1)).tolist(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--strategy",
        choices=["auto", "none", "dp", "ddp", "fsdp", "exact"],
        default="auto",
        help="how replicas are kept equal; auto: ddp in several processes, none in one; exact: "
        "bitwise identical at every number",
    )
    add(
        "--exact-check",
        type=int,
        metavar="N",
        help="train with --strategy exact in one process, then in N, and compare the fingerprints",
    )
    add(
        "--data",
        choices=["mnist", "digits"],
        default="mnist",
        help="mnist (downloaded), or scikit-learn's digits, which need no network",
    )
    add("--data-dir", default="data", help="where MNIST is, or is downloaded to")
    add("--epochs", type=int, default=5, help="times through the training set")
    add("--batch-size", type=int, help="images of one step, over all processes (512; digits: 64)")
    add(
        "--microbatch-size",
        type=int,
        help="images that are run at once, for --strategy exact (a sixteenth of the batch size)",
    )
    add("--lr", type=float, default=0.002, help="Adam's learning rate at the start")
    add("--lr-decay-step", type=int, default=1, help="epochs between two decays of the rate")
    add("--lr-decay-factor", type=float, default=0.5, help="what the rate is multiplied by then")
    add("--device-ids", type=int, nargs="+", help="GPUs of --strategy dp (default: all)")
    add("--num-workers", type=int, help="loader workers of each process (default: by the cores)")
    add("--augment", action="store_true", help="random rotations, shifts and scales")
    add(
        "--cache",
        action="store_true",
        help="decode the images once, into $PARDATA_CACHE or else the user's cache directory, and "
        "transform whole batches",
    )
    add("--no-dropout", action="store_true", help="train without dropout, to compare world sizes")
    add(
        "--double",
        action="store_true",
        help="train in float64: slower, and nearly without rounding",
    )
    add("--local-rank", help=argparse.SUPPRESS)  # the old torch.distributed.launch gives it
    add("--seed", type=int, default=0, help="of the weights, the order and the noise")
    add("--log-interval", type=int, default=10, help="steps between two losses in the log")
    add("--run-dir", help="where results go, and from where to resume (default: runs/mnist-<time>)")
    add("--save-every", type=int, metavar="STEPS", help="also save within epochs, every so often")
    add("--requeue", type=int, default=0, metavar="CODE", help="exit status when stopped (0)")
    add("--show-shapes", action="store_true", help="print what the model sees of the first batch")
    return parser.parse_args()


def main() -> int | str | None:
    args = parse()
    if args.exact_check:
        return exact_check(args.exact_check)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    with pardata.init() as world:
        if args.strategy in ("none", "dp") and world.size > 1:
            return f"--strategy {args.strategy} runs in one process, not in {world.size}: use ddp"
        run_dir = args.run_dir or pardata.rank_zero_call(time.strftime, "runs/mnist-%Y%m%d-%H%M%S")
        pardata.seed_everything(args.seed)
        train_loader, test_loader = make_loaders(args)
        options = {"device_ids": args.device_ids} if args.strategy == "dp" else {}
        network = ConvNet(dropout=not args.no_dropout)
        if args.double:
            network.double()
        model = wrap_model(network, args.strategy, **options)
        model.show_shapes = args.show_shapes
        optimizer = optim.Adam(model.parameters(), lr=args.lr)
        scheduler = optim.lr_scheduler.StepLR(optimizer, args.lr_decay_step, args.lr_decay_factor)
        run = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        run["loader"] = train_loader
        checkpointer = pardata.Checkpointer(Path(run_dir) / "checkpoints", asynchronous=True)
        step = checkpointer.restore(**run).step
        steps = itertools.count(step + 1)
        begin = time.perf_counter()
        metrics = pardata.MetricWriter(run_dir, after=step)
        with metrics as writer, pardata.StopSignal() as stop, checkpointer:
            for epoch in range(train_loader.epoch, args.epochs):
                rate = scheduler.get_last_lr()[0]
                log.info("epoch %d/%d  learning rate %g", epoch + 1, args.epochs, rate)
                for step in train_epoch(model, train_loader, optimizer, writer, steps, args=args):
                    if stop.agreed():
                        checkpointer.save(step, **run)
                        log.info("stopped; --run-dir %s resumes after step %d", run_dir, step)
                        return args.requeue
                    if args.save_every and step % args.save_every == 0:
                        checkpointer.save(step, **run)
                report(evaluate(model, test_loader), step, train_loader.stats(), writer)
                scheduler.step()
                checkpointer.save(step, **run)
        log.info("total training time %.1f s", time.perf_counter() - begin)
        if world.is_main:
            log.info("curves in %s", curves.draw(run_dir))
        log.info("fingerprint of the weights %s", pardata.fingerprint(model)[:16])
    return None


def report(
    result: dict[str, Any], step: int, spent: dict[str, float], writer: pardata.MetricWriter
) -> None:
    """Log one epoch's times and results."""
    seconds, waited = spent["seconds"], spent["wait_seconds"]
    accuracy = 100 * result["correct"] / result["images"]
    log.info(
        "epoch time %.2f s: %.2f s waiting for data, %.2f s computing",
        seconds,
        waited,
        seconds - waited,
    )
    log.info(
        "test loss %.4f  accuracy %.2f %% (%d/%d images)",
        result["loss"],
        accuracy,
        result["correct"],
        result["images"],
    )
    log.info(
        "accuracy of class  %s",
        "  ".join(f"{digit}: {value:.1f} %" for digit, value in enumerate(result["of class"])),
    )
    writer.write(
        step,
        {
            "test/loss": result["loss"],
            "test/accuracy": accuracy,
            "time/epoch": seconds,
            "time/waiting": waited,
        },
    )


def exact_check(size: int) -> str | None:
    """Run this script in one process and in `size`; return what is wrong, if they differ."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--exact-check")
    _, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as directory:  # each its own: neither resumes a run
        found = [trained(n, [*others, "--run-dir", f"{directory}/{n}"]) for n in (1, size)]
    if None in found:
        return "a run failed"
    if found[0] != found[1]:
        return f"1 and {size} processes differ: {found[0]} and {found[1]}"
    print(f"1 and {size} processes are bitwise identical: {found[0]}")
    return None


def trained(processes: int, options: list[str]) -> str | None:
    """Run this script; return the fingerprint of the weights, or None where it failed."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, "-m", *launcher, __file__, *options, "--strategy", "exact"]
    print(f"in {processes} process(es): {' '.join(command[1:])}", flush=True)
    last = ""
    with subprocess.Popen(  # noqa: S603  # this very script
        command, stdout=subprocess.PIPE, text=True
    ) as job:
        for line in job.stdout or ():
            print(f"    {line}", end="", flush=True)
            last = line.rstrip()
    return last.split()[-1] if job.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
