"""What init's tuning of the allocator (tune_cpu) saves on CPUs: page faults, and time per step.

    python benchmarks/allocator.py
    python benchmarks/allocator.py --rounds 1 --steps 4 --sizes 1 --nets mlp lstm

Five kinds of nets with Adam on made-up data: the convolutional net of articles/mnist.py, a wide
MLP, ResNet-18 on images of 32 pixels (if torchvision is there), a transformer and an LSTM, in one
process and in two that share the cores. The setting lasts for the life of a process, so each
measurement takes fresh ones, with tune_cpu=True and with False in turns. Losses must be equal to
the bit. It has an effect under glibc only, that is on most Linux systems.
"""

import argparse
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
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
from torch import Tensor, nn
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


def resnet() -> nn.Module:
    """Return torchvision's ResNet-18."""
    from torchvision.models import resnet18  # noqa: PLC0415  # optional

    return resnet18(num_classes=10)


class Sequences(nn.Module):
    """Classify sequences of 128-wide vectors by the mean of what `body` makes of them."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(128, 10)

    def forward(self, rows: Tensor) -> Tensor:
        """Return a score for each class."""
        made = self.body(rows)
        return self.head((made[0] if isinstance(made, tuple) else made).mean(1))


def transformer() -> nn.Module:
    """Return four layers of an encoder."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return Sequences(nn.TransformerEncoder(layer, 4))


def mlp() -> nn.Module:
    """Return four wide layers."""
    wide = [part for _ in range(3) for part in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*wide, nn.Linear(1024, 10))


@dataclass(frozen=True)
class Net:
    """A kind of net: what it is, and the batch that it trains on."""

    title: str
    build: Callable[[], nn.Module]
    batch_size: int  # of all processes together
    sample: tuple[int, ...]


NETS = {
    "conv": Net("ConvNet", conv_net, 512, (1, 28, 28)),
    "mlp": Net("MLP, 4 layers of 1024", mlp, 512, (1024,)),
    "resnet": Net("ResNet-18", resnet, 128, (3, 32, 32)),
    "transformer": Net("transformer, 4 layers of 128", transformer, 64, (128, 128)),
    "lstm": Net(
        "LSTM, 2 layers of 128",
        lambda: Sequences(nn.LSTM(128, 128, 2, batch_first=True)),
        128,
        (64, 128),
    ),
}


def train(net: str, steps: int, tune_cpu: bool) -> dict[str, Any]:  # noqa: FBT001  # by run
    """Train as one of the ranks; return what a step took, a rank, and the losses of all ranks."""
    world = pardata.init(device="cpu", tune_cpu=tune_cpu)
    torch.set_num_threads(max(1, usable_cores() // world.size))
    torch.manual_seed(0)
    kind = NETS[net]
    model = pardata.wrap_model(kind.build())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    torch.manual_seed(world.rank)  # samples and dropout of each rank's own
    samples = torch.randn(kind.batch_size // world.size, *kind.sample)
    labels = torch.randint(10, (len(samples),))

    def step() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(samples), labels)
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


def measure(size: int, net: str, steps: int, *, tune_cpu: bool) -> dict[str, Any]:
    """Train in fresh processes; return what rank 0 of them reports."""
    env = {"PARDATA_TUNE_CPU": ""}  # it would overrule the argument
    return run(train, net, steps, tune_cpu, world_size=size, timeout=3600, env=env)[0]


def compare(size: int, net: str, args: argparse.Namespace) -> list[Row]:
    """Measure with and without; return two rows for each quantity."""
    found = alternate(
        {
            DEFAULT: partial(measure, size, net, args.steps, tune_cpu=False),
            TUNED: partial(measure, size, net, args.steps, tune_cpu=True),
        },
        args.rounds,
    )
    losses = [report["losses"] for reports in found.values() for report in reports]
    require(holds=all(other == losses[0] for other in losses), what="their losses differ")
    rows = []
    for quantity, limit in QUANTITIES.items():
        used = {
            name: [report["used"][quantity] for report in reports]
            for name, reports in found.items()
        }
        reach = limit if net == "conv" else None
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
    there = [name for name in NETS if name != "resnet" or find_spec("torchvision")]
    arguments.add_argument(
        "--nets", nargs="+", choices=there, default=there, help="kinds of nets (default: all)"
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
    for size, net in product(args.sizes, args.nets):
        processes = "1 process" if size == 1 else f"each of {size} processes"
        what = f"{NETS[net].title}, global batch {NETS[net].batch_size}, Adam"
        title = f"{what}: {processes}, {args.rounds} runs of {args.steps} steps"
        tables[title] = compare(size, net, args)
        print_table(title, "", tables[title])
        print(f"losses of all runs at size {size}: equal to the bit", flush=True)
    if args.save:
        save(args.save, __file__, about, tables)


if __name__ == "__main__":
    main()
