"""What init's tuning of the allocator (tune_cpu) saves on CPUs: page faults, and time per step.

    python benchmarks/allocator.py
    python benchmarks/allocator.py --rounds 1 --steps 4 --sizes 1

The convolutional net of articles/mnist.py, global batch 512, Adam, on made-up images, in one
process and in two that share the cores. The setting lasts for the life of a process, so each
measurement takes fresh ones, with tune_cpu=True and with False in turns. Losses must be equal to
the bit. It has an effect under glibc only, that is on most Linux systems.
"""

import argparse
import platform
import resource
import sys
import time
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from _measure import (
    Reach,
    Row,
    alternate,
    parser,
    positive,
    print_environment,
    print_table,
    require,
    save,
    usable_cores,
)
from torch import nn
from torch.nn.functional import cross_entropy

import pardata
from pardata.testing import run

DEFAULT, TUNED = "tune_cpu=False", "tune_cpu=True"
WARM_UP = 2

QUANTITIES = {
    "ms a step": Reach(0.75),
    "page faults a step": Reach(0.05),
    "ms of system CPU a step": None,
    "MB at most": Reach(1.15),
}


def conv_net() -> nn.Module:
    """Return the net of examples/articles/mnist.py."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def train(batch_size: int, steps: int, tune_cpu: bool) -> dict[str, Any]:  # noqa: FBT001  # by run
    """Train as one of the ranks; return what a step took, a rank, and the losses of all ranks."""
    world = pardata.init(device="cpu", tune_cpu=tune_cpu)
    torch.set_num_threads(max(1, usable_cores() // world.size))
    torch.manual_seed(0)
    model = pardata.wrap_model(conv_net())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    torch.manual_seed(world.rank)  # images and dropout of each rank's own
    images = torch.randn(batch_size // world.size, 1, 28, 28)
    labels = torch.randint(10, (len(images),))

    def step() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    losses = [step() for _ in range(WARM_UP)]
    seconds = []
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = {
        "ms a step": median(seconds) * 1e3,
        "page faults a step": (after.ru_minflt - before.ru_minflt) / steps,
        "ms of system CPU a step": (after.ru_stime - before.ru_stime) / steps * 1e3,
        "MB at most": after.ru_maxrss / 1024,  # Linux counts in kB
    }
    return {"used": pardata.all_reduce_mean(used), "losses": pardata.all_gather(losses)}


def measure(size: int, args: argparse.Namespace, *, tune_cpu: bool) -> dict[str, Any]:
    """Train in fresh processes; return what rank 0 of them reports."""
    arguments = args.batch_size, args.steps, tune_cpu
    env = {"PARDATA_TUNE_CPU": ""}  # it would overrule the argument
    return run(train, *arguments, world_size=size, timeout=3600, env=env)[0]


def compare(size: int, args: argparse.Namespace) -> list[Row]:
    """Measure with and without; return two rows for each quantity."""
    found = alternate(
        {
            DEFAULT: partial(measure, size, args, tune_cpu=False),
            TUNED: partial(measure, size, args, tune_cpu=True),
        },
        args.rounds,
    )
    losses = [report["losses"] for reports in found.values() for report in reports]
    require(holds=all(other == losses[0] for other in losses), what="their losses differ")
    rows = []
    for quantity, reach in QUANTITIES.items():
        used = {
            name: [report["used"][quantity] for report in reports]
            for name, reports in found.items()
        }
        pair = Row(DEFAULT, used[DEFAULT]), Row.compare(used, TUNED, DEFAULT, reach)
        rows += [replace(row, name=f"{quantity}, {row.name}") for row in pair]
    return rows


def main() -> None:
    """Measure at each size and print the tables."""
    arguments = parser(__doc__, 5, "fresh runs with and without")
    arguments.add_argument(
        "--steps",
        type=positive,
        default=10,
        help=f"steps of a run, after {WARM_UP} more (default: 10)",
    )
    arguments.add_argument(
        "--batch-size", type=positive, default=512, help="of all processes together (default: 512)"
    )
    arguments.add_argument(
        "--sizes",
        type=positive,
        nargs="+",
        default=[1, 2],
        help="processes (default: 1 2)",
    )
    args = arguments.parse_args()
    if platform.libc_ver()[0] != "glibc":
        sys.exit("tune_cpu has an effect under glibc only, which this system does not have")
    about = print_environment()
    tables = {}
    for size in args.sizes:
        processes = "1 process" if size == 1 else f"each of {size} processes"
        what = f"ConvNet, global batch {args.batch_size}, Adam"
        title = f"{what}: {processes}, {args.rounds} runs of {args.steps} steps"
        tables[title] = compare(size, args)
        print_table(title, "", tables[title])
        print(f"losses of all runs at size {size}: equal to the bit", flush=True)
    if args.save:
        save(args.save, __file__, about, tables)


if __name__ == "__main__":
    main()
