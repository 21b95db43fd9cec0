"""Train on 4 processes, be killed, go on on 2, be killed, end on 3: to the last bit as on 1.

    python examples/elastic.py                    # the whole story, on one machine
    python examples/elastic.py --sizes 2 1 2      # on other numbers of processes
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/elastic.py --run-dir runs/e

A small convolutional net with batch norm and dropout learns scikit-learn's handwritten digits under
strategy "exact", and saves a checkpoint every few steps: the weights, the optimizer's state, and
the few numbers of ``loader.state_dict()``. Started by torchrun, or in one process with --run-dir,
it goes on from the newest one. Otherwise it starts such runs, of which all but the last are killed
at a random moment (--die-at, SIGKILL), and compares the weights with those of a run in one process
that nobody disturbed.
"""

import argparse
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from example_data import Digits
from torch import nn, optim
from torchvision import transforms

import pardata
from pardata import backward, make_loader, wrap_model

log = pardata.get_logger("elastic")


class BatchNormNet(nn.Sequential):
    """What is hardest to reproduce: batch norm, dropout and a convolution."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(16 * 4 * 4, 10),
        )


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean loss over the images of `batch`."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train(args: argparse.Namespace) -> None:
    """Train from where the newest checkpoint is, to the end."""
    with pardata.init() as world:
        pardata.seed_everything(args.seed)
        model = wrap_model(BatchNormNet(), "exact")
        optimizer = optim.Adam(model.parameters(), lr=0.005)
        # Random shifts, the same for an image wherever it is read.
        shifts = transforms.RandomAffine(0, translate=(0.1, 0.1))
        augmented = transforms.Compose([shifts, transforms.ToTensor()])
        images = Digits(train=True, size=8, mode="L", transform=augmented)
        loader = make_loader(images, 64, microbatch_size=8, shuffle=True, seed=args.seed)
        run = {"model": model, "optimizer": optimizer, "loader": loader}
        checkpointer = pardata.Checkpointer(Path(args.run_dir) / "checkpoints")
        step = checkpointer.restore(**run).step
        if step:
            log.info("goes on in %d process(es) after step %d", world.size, step)
        begin = step
        for _ in range(loader.epoch, args.epochs):
            for batch in loader:
                optimizer.zero_grad()
                loss = backward(model, mean_loss, batch)
                optimizer.step()
                step += 1
                log.info("epoch %d, step %d, loss %.4f", loader.epoch, step, loss)
                if (
                    step - begin == args.die_at
                    and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
                ):
                    die(within=0.02)
                if step % args.save_every == 0:
                    checkpointer.save(step, **run)
        log.info("fingerprint %s", pardata.fingerprint(model))


def die(within: float) -> None:
    """Kill this process as the machine might, at a random moment of the next seconds."""
    moment = random.Random().uniform(0, within)  # noqa: S311  # another each time
    threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()


def run(size: int, run_dir: str, args: argparse.Namespace, die_at: int | None = None) -> str:
    """Train in so many processes, to the end or until they die; return the last word."""
    print(f"{size} process(es)" + (f", killed in step {die_at + 1}" if die_at else ""), flush=True)
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    options = [f"--run-dir={run_dir}", f"--epochs={args.epochs}", f"--seed={args.seed}"]
    options += [f"--save-every={args.save_every}"] + ([f"--die-at={die_at}"] if die_at else [])
    last = ""
    with subprocess.Popen(  # noqa: S603  # this very script
        [sys.executable, "-m", *launcher, __file__, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if die_at else None,  # torchrun's account of the death
        text=True,
    ) as job:
        for line in job.stdout or ():
            last = line.rstrip()
            if "goes on" in last:
                print(f"    {last}", flush=True)
    print(f"    {last}", flush=True)
    if bool(job.returncode) != bool(die_at):
        sys.exit(f"the run ended with {job.returncode}")
    return last.split()[-1]


def main() -> None:
    args = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if args.run_dir or "TORCHELASTIC_RUN_ID" in os.environ:
        train(args)
        return
    with tempfile.TemporaryDirectory() as directory:
        expected = run(1, f"{directory}/undisturbed", args)
        *killed, last = args.sizes
        for size in killed:
            moment = random.Random().randint(2, 20)  # noqa: S311  # another each time
            run(size, f"{directory}/moved", args, die_at=moment)
        found = run(last, f"{directory}/moved", args)
    if found != expected:
        sys.exit("the weights differ")
    print(f"the same to the last bit on 1 and on {', '.join(map(str, args.sizes))}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[4, 2, 3], help="processes, one run after another")
    add("--epochs", type=int, default=3, help="times through the training set, of 22 steps each")
    add("--save-every", type=int, default=5, help="steps between two checkpoints")
    add("--die-at", type=int, metavar="STEP", help="kill each process after so many steps")
    add("--run-dir", help="train, with checkpoints there (default: the whole story)")
    add("--seed", type=int, default=0, help="of the weights, the order and the noise")
    return parser.parse_args()


if __name__ == "__main__":
    main()
