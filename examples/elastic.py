"""Train on 4 processes, be killed, resume on 2, be killed, end on 3: bitwise identical to 1.

    python examples/elastic.py                  # the whole story, on one machine
    python examples/elastic.py --sizes 2 1 2    # on other numbers of processes
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/elastic.py --run-dir runs/e

A net with batch norm and dropout learns scikit-learn's handwritten digits, randomly shifted, under
strategy "exact", and saves a checkpoint every few steps. With --run-dir it trains, and resumes from
the newest checkpoint. Without, it starts such runs, kills all but the last at a random moment, and
compares the weights with those of a run in one process that nobody disturbed.
"""

import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from argparse import ArgumentParser, RawTextHelpFormatter

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import pardata

log = pardata.get_logger("elastic")  # INFO lines come from rank 0 alone


def shift(batch):
    """Move the images of a microbatch by a pixel; its random numbers have a seed of their own."""
    images, labels = batch
    return images.roll(torch.randint(-1, 2, (2,)).tolist(), dims=(2, 3)), labels


def mean_loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train(args):
    """Train from where the newest checkpoint is to the end."""
    pardata.seed_everything(args.seed)
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    digits = TensorDataset(images.view(-1, 1, 8, 8).float() / 16, labels)
    loader = pardata.make_loader(
        digits, 64, microbatch_size=8, shuffle=True, drop_last=True, batch_transform=shift
    )
    net = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(16 * 4 * 4, 10)),
    )
    model = pardata.wrap_model(net, "exact")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    run = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpointer = pardata.Checkpointer(f"{args.run_dir}/checkpoints")
    begin = step = checkpointer.restore(**run).step
    if begin:
        log.info("resumes after step %d on world size %d", begin, pardata.world().size)
    for epoch in loader.epochs(args.epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = pardata.backward(model, mean_loss, batch)
            optimizer.step()
            step += 1
            log.info("epoch %d, step %d, loss %.4f", epoch, step, loss)
            if step - begin == args.die_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                # As the machine might end it: at a random moment of the next milliseconds.
                moment = random.Random().uniform(0, 0.02)  # noqa: S311  # another each time
                threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if step % args.save_every == 0:
                checkpointer.save(step, **run)
    log.info("fingerprint %s", pardata.fingerprint(model))


def run(size, run_dir, args, die_at=0):
    """Train in so many processes, to the end or until they die; return the last word printed."""
    end = f", to be killed in step {die_at + 1} of this start" if die_at else ""
    print(f"training on world size {size}{end}", flush=True)
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={size}", __file__]
    options = {"--epochs": args.epochs, "--seed": args.seed, "--save-every": args.save_every}
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, "-m", *launcher, "--run-dir", run_dir, *words, f"--die-at={die_at}"]
    hidden = subprocess.DEVNULL if die_at else None  # torchrun's account of the death
    job = subprocess.run(command, stdout=subprocess.PIPE, stderr=hidden, text=True, check=False)  # noqa: S603  # this very script
    lines = job.stdout.splitlines()
    told = [line for line in lines if "resume" in line or "fingerprint" in line]
    print("".join(f"    {line}\n" for line in told), end="", flush=True)
    if bool(job.returncode) != bool(die_at):
        sys.exit(f"the run ended with {job.returncode}")
    return lines[-1].split()[-1]


def tell(args):
    """Train without a disturbance, then with some, and compare."""
    with tempfile.TemporaryDirectory() as directory:
        expected = run(1, f"{directory}/undisturbed", args)
        *killed, last = args.sizes
        for size in killed:
            # Another each time, and after a new checkpoint.
            moment = args.save_every + random.Random().randint(1, 15)  # noqa: S311  # for no secret
            run(size, f"{directory}/moved", args, die_at=moment)
        found = run(last, f"{directory}/moved", args)
    if found != expected:
        sys.exit("the weights differ")
    print(f"bitwise identical on 1 and on {', '.join(map(str, args.sizes))}")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawTextHelpFormatter)
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=[4, 2, 3], help="processes, one run after another")
    add("--epochs", type=int, default=3, help="times through the training set, of 28 steps each")
    add("--save-every", type=int, default=5, help="steps between two checkpoints")
    add("--die-at", type=int, metavar="STEP", help="kill each process after so many steps")
    add("--run-dir", help="train, with checkpoints there (default: the whole story)")
    add("--seed", type=int, default=0, help="of the weights, the order and the noise")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if args.run_dir is None:
        tell(args)
    else:
        with pardata.init():
            train(args)
