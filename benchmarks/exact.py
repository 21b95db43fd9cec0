"""What strategy "exact" costs over "ddp", with the same microbatches: time and memory.

    python benchmarks/exact.py
    python benchmarks/exact.py --rounds 1 --steps 2 --nets convnet

The convolutional net of articles/mnist.py and torchvision's ResNet-18 for images of 32 x 32, each
with the same global batches cut into the same microbatches, by pardata.backward, Adam, on made-up
images, in two processes of one thread each, in turns in fresh processes. What exact adds: rounding
each gradient to fixed point and sending 16 bytes a parameter where DDP sends 4. The weights of both
must agree to rounding, and exact's to the bit in all rounds. Needs torchvision.
"""

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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
)
from allocator import conv_net
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torchvision.models import resnet18

import pardata
from pardata.testing import run

WARM_UP = 1

QUANTITIES = "s a step", "MB at most"


@dataclass(frozen=True)
class Contest:
    """A net, the batches that it learns, and what the time of a step is to reach."""

    net: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    microbatch_size: int
    reach: Reach


NETS = {
    "convnet": Contest(conv_net, (1, 28, 28), 512, 64, Reach(1.05)),
    "resnet18": Contest(partial(resnet18, num_classes=10), (3, 32, 32), 512, 64, Reach(1.15)),
}


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss over a microbatch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def train(name: str, strategy: str, steps: int, *, without_noise: bool) -> dict[str, Any]:
    """Train as one of the ranks; return what a step took, and the weights at the end."""
    pardata.init(device="cpu")
    torch.set_num_threads(1)  # as exact does
    contest = NETS[name]
    torch.manual_seed(0)
    net = contest.net()
    if without_noise:
        net.apply(_quiet)
    model = pardata.wrap_model(net, strategy)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    count = contest.batch_size * (WARM_UP + steps)
    images = torch.randn(count, *contest.shape)
    data = TensorDataset(images, torch.randint(10, (count,)))
    loader = pardata.make_loader(
        data, contest.batch_size, microbatch_size=contest.microbatch_size, seed=0
    )
    seconds = []
    for batch in loader:
        start = time.perf_counter()
        optimizer.zero_grad()
        pardata.backward(model, mean_loss, batch)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in kB
    used = {"s a step": median(seconds[WARM_UP:]), "MB at most": peak}
    weights = [p.detach().double().norm().item() for p in model.parameters()]
    return {"used": pardata.all_reduce_mean(used), "weights": weights}


def _quiet(module: nn.Module) -> None:
    if isinstance(module, nn.Dropout):
        module.p = 0.0


def measure(name: str, strategy: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train in two fresh processes; return what rank 0 of them reports."""
    job = partial(train, without_noise=True)  # dropout of both would differ, and their weights
    return run(job, name, strategy, args.steps, world_size=2, timeout=3600)[0]


def compare(name: str, args: argparse.Namespace) -> list[Row]:
    """Measure both strategies in turns; return two rows for each quantity."""
    found = alternate(
        {strategy: partial(measure, name, strategy, args) for strategy in ("ddp", "exact")},
        args.rounds,
    )
    exact = [torch.tensor(report["weights"]) for report in found["exact"]]
    require(
        holds=all(torch.equal(other, exact[0]) for other in exact), what="exact differs by round"
    )
    # Batch norm differs: ddp takes rank 0's statistics, which train nothing, and Adam amplifies.
    near = torch.allclose(torch.tensor(found["ddp"][0]["weights"]), exact[0], rtol=1e-2)
    require(holds=near, what="their weights differ")
    rows = []
    for quantity in QUANTITIES:
        used = {
            who: [report["used"][quantity] for report in reports] for who, reports in found.items()
        }
        reach = NETS[name].reach if quantity == QUANTITIES[0] else None
        pair = Row("ddp", used["ddp"]), Row.compare(used, "exact", "ddp", reach)
        rows += [replace(row, name=f"{quantity}, {row.name}") for row in pair]
    return rows


def main() -> None:
    """Measure each net and print the tables."""
    arguments = parser(__doc__, 5, "fresh runs of each strategy")
    arguments.add_argument(
        "--steps", type=positive, default=4, help=f"of a run, after {WARM_UP} more (default: 4)"
    )
    arguments.add_argument(
        "--nets", nargs="+", choices=NETS, default=list(NETS), help="which (default: all)"
    )
    args = arguments.parse_args()
    about = print_environment()
    tables = {}
    for name in args.nets:
        contest = NETS[name]
        title = (
            f"{name}, 2 processes, batches of {contest.batch_size} in microbatches of "
            f"{contest.microbatch_size}"
        )
        tables[title] = compare(name, args)
        print_table(title, "", tables[title])
    if args.save:
        save(args.save, __file__, about, tables)


if __name__ == "__main__":
    main()
