"""Train while nodes die and join: after some steps, wait until the world has another size.

    torchrun … sizes.py --run-dir DIR --wait 4:2 8:1 12:2

trains to step 4 in a world of any size, on to step 8 in one of 2, and so on. A checkpoint is saved
at every step, so a world that forms anew goes on where the last one was. Without --wait it just
trains. The last line is a fingerprint.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from pardata import (
    Checkpointer,
    all_reduce_sum,
    backward,
    fingerprint,
    init,
    make_loader,
    seed_everything,
    wrap_model,
)

STEPS = 16


def mean_loss(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def wait_for_size(here, step, wanted):
    """Stay in touch, and so notice when a node dies, until torchrun makes another world."""
    size = wanted.get(step, here.size)
    if size != here.size and here.is_main:
        print(f"after step {step} a world of {here.size} waits for one of {size}", flush=True)
    while size != here.size:
        all_reduce_sum(1)
        time.sleep(0.05)


def train(run_dir, wanted):
    with init() as here:
        seed_everything(0)
        data = TensorDataset(torch.randn(STEPS * 8, 4), torch.arange(STEPS * 8) % 3)
        loader = make_loader(data, 8, microbatch_size=2, shuffle=True, seed=0)
        network = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 3)
        )
        model = wrap_model(network, "exact")
        optimizer = torch.optim.Adam(model.parameters())
        run = {"model": model, "optimizer": optimizer, "loader": loader}
        checkpointer = Checkpointer(Path(run_dir) / "checkpoints")
        step = checkpointer.restore(**run).step
        wait_for_size(here, step, wanted)
        for batch in loader:
            optimizer.zero_grad()
            backward(model, mean_loss, batch)
            optimizer.step()
            step += 1
            checkpointer.save(step, **run)
            if here.is_main:
                print(f"step {step} in a world of {here.size}", flush=True)
            wait_for_size(here, step, wanted)
        value = fingerprint(model)
        if here.is_main:
            print(f"fingerprint of the weights {value}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--wait", nargs="*", default=[], metavar="STEP:SIZE")
    args = parser.parse_args()
    train(args.run_dir, {int(s): int(n) for s, n in (pair.split(":") for pair in args.wait)})
