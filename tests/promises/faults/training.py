"""An exact training that saves often, to be killed: by torchrun on any number of processes.

Ends after --steps, or with the epoch in which a file "enough" appears in the run directory.
The last line says at which step, with which weights, and how often each sample was seen.
With ``--wait 4:2 8:1`` it trains to step 4 in a world of any size, on to step 8 in one of 2, and so
on: it waits there until torchrun makes such a world, of nodes that die and join.
"""

import argparse
import logging
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import pardata

SAMPLES = 96
LOG = pardata.get_logger("faults")


class Squares(torch.utils.data.Dataset):
    """Points, to be told whether they are in the unit circle."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        time.sleep(0.002)  # so that a cache takes a moment to build
        point = torch.randn(2, generator=torch.Generator().manual_seed(index))
        return point, int(point.norm() < 1), index


class Momentum:
    """SGD with momentum. PyTorch's imports half of torch first, which takes a second a start."""

    def __init__(self, model):
        self.parameters = list(model.parameters())
        self.velocities = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self):
        for parameter, velocity in zip(self.parameters, self.velocities, strict=True):
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.sub_(velocity, alpha=0.05)
            parameter.grad = None

    def state_dict(self):
        return {"velocities": self.velocities}

    def load_state_dict(self, state):
        self.velocities = state["velocities"]


def mean_loss(model, batch):
    points, labels, _ = batch
    return cross_entropy(model(points), labels)


def counted(batch):
    """Return how often each sample is in the global batch."""
    counts = torch.zeros(SAMPLES, dtype=torch.int64)
    for _, _, indices in batch:
        counts[indices] += 1
    return pardata.all_reduce_sum(counts)


def wait_for_size(step, wanted):
    """Stay in touch, and so notice when a node dies, until torchrun makes another world."""
    size = pardata.world().size
    if (other := wanted.get(step, size)) != size:
        LOG.info("after step %d a world of %d waits for one of %d", step, size, other)
    while other != size:
        pardata.all_reduce_sum(1)
        time.sleep(0.05)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=60)
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--wait", nargs="*", default=[], metavar="STEP:SIZE")
    args = parser.parse_args()
    wanted = {int(step): int(size) for step, size in (pair.split(":") for pair in args.wait)}
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    with pardata.init(timeout=timedelta(seconds=args.timeout)):
        data = pardata.cache_dataset(Squares(), args.run_dir / "cache", num_workers=0)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 2))
        model = pardata.wrap_model(net, "exact")
        optimizer = Momentum(model)
        loader = pardata.make_loader(data, 16, microbatch_size=4, shuffle=True, seed=1)
        run = {"model": model, "optimizer": optimizer, "loader": loader}
        seen, step = torch.zeros(SAMPLES, dtype=torch.int64), 0
        saver = pardata.Checkpointer(args.run_dir / "checkpoints", asynchronous=args.asynchronous)
        if restored := saver.restore(**run):
            seen, step = restored.values["seen"], restored.step
            wait_for_size(step, wanted)
        with saver:
            while step % len(loader) or not step or not is_enough(args, step):
                for batch in loader:
                    pardata.backward(model, mean_loss, batch)
                    optimizer.step()
                    seen += counted(batch)
                    step += 1
                    if step % args.save_every == 0:
                        saver.save(step, seen=seen, **run)
                        LOG.info("step %d in a world of %d", step, pardata.world().size)
                    wait_for_size(step, wanted)
            # Also where it was killed right after its last save: what that left is for a save.
            saver.save(step, seen=seen, **run)
        weights = pardata.fingerprint(model)
        LOG.info("ended %d %s %d %d", step, weights, seen.min(), seen.max())


def is_enough(args, step):
    if args.steps is not None:
        return step >= args.steps
    return pardata.rank_zero_call((args.run_dir / "enough").exists)


if __name__ == "__main__":
    main()
