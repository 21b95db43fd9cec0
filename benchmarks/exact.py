"""What strategy "exact" costs over "ddp", with the same microbatches: time, CPU time and memory.

    python benchmarks/exact.py
    python benchmarks/exact.py --rounds 2 --nets convnet

The convolutional net of articles/mnist.py, torchvision's ResNet-18 for images of 32 x 32, both with
microbatches of 64 and of 4, and a small perceptron, each with the same global batches cut into the
same microbatches, by pardata.backward, Adam, on made-up images, in two processes of one thread
each. Both strategies take turns, step by step, in the same pair of processes. The CPU seconds are
those of both processes: waiting is not in them. Then memory: what a step adds to a process, at its
peak, for each parameter of a wide perceptron trained by SGD, with 1 and 4 microbatches on each
rank, in fresh processes. Needs torchvision.
"""

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from _measure import Report, Row, alternate, parser, require
from _nets import conv_net, mean_loss
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.models import resnet18

import pardata
from pardata.testing import run

STRATEGIES = ("ddp", "exact")
WARM_UP = 3
QUANTITIES = ("s a step", "CPU s a step")
IMAGES, PICTURES = (1, 28, 28), (3, 32, 32)


@dataclass(frozen=True)
class Contest:
    """A net, the batches that it learns, and the target of the time of a step."""

    net: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    microbatch_size: int
    target: str = ""


def perceptron() -> nn.Module:
    """Return the small perceptron of training_loop.py."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def wide_net() -> nn.Module:
    """Return a net of 17 million parameters that runs quickly."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 1024), *(nn.Linear(1024, 1024) for _ in range(15))
    )


_resnet = partial(resnet18, num_classes=10)
NETS = {
    "convnet": Contest(conv_net, IMAGES, 512, 64, "exact, microbatches of 64"),
    "convnet, 4": Contest(conv_net, IMAGES, 32, 4, "exact, microbatches of 4"),
    "resnet18": Contest(_resnet, PICTURES, 512, 64, "exact, microbatches of 64"),
    "resnet18, 4": Contest(_resnet, PICTURES, 32, 4, "exact, microbatches of 4"),
    "perceptron": Contest(perceptron, IMAGES, 64, 32),
}


def made(contest: Contest, strategy: str) -> nn.Module:
    """Return the net of a contest, wrapped."""
    torch.manual_seed(0)
    net = contest.net()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # that of both would differ, and their weights
    return pardata.wrap_model(net, strategy)


def batches(contest: Contest, count: int) -> Any:
    """Return a loader of so many global batches."""
    images = torch.randn(count * contest.batch_size, *contest.shape)
    data = TensorDataset(images, torch.randint(10, (len(images),)))
    size, of = contest.batch_size, contest.microbatch_size
    return pardata.make_loader(data, size, microbatch_size=of, seed=0)


def compete(name: str, rounds: int) -> dict[str, Any]:
    """Train under both strategies in turns, as one of the ranks; return what each step took."""
    pardata.init(device="cpu")
    torch.set_num_threads(1)  # as exact does
    contest = NETS[name]
    models = {strategy: made(contest, strategy) for strategy in STRATEGIES}
    optimizers = {
        strategy: torch.optim.Adam(model.parameters(), lr=1e-4)
        for strategy, model in models.items()
    }
    loader = iter(batches(contest, WARM_UP + rounds))

    def step(strategy: str, batch: Any) -> tuple[float, float]:
        pardata.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        optimizers[strategy].zero_grad()
        pardata.backward(models[strategy], mean_loss, batch)
        optimizers[strategy].step()
        return time.perf_counter() - start, time.process_time() - cpu

    def turn(strategy: str) -> tuple[float, float]:
        taken = waiting.setdefault(strategy, [])
        if not taken:
            batch = next(loader)
            for other in STRATEGIES:
                waiting.setdefault(other, []).append(batch)
        return step(strategy, taken.pop(0))

    waiting: dict[str, list[Any]] = {}
    found = alternate({who: partial(turn, who) for who in STRATEGIES}, WARM_UP + rounds)
    used = {
        quantity: {who: [each[n] for each in found[who][WARM_UP:]] for who in STRATEGIES}
        for n, quantity in enumerate(QUANTITIES)
    }
    weights = {
        who: [p.detach().double().norm().item() for p in model.parameters()]
        for who, model in models.items()
    }
    return {"used": pardata.all_reduce_mean(used), "weights": weights}


def remember(strategy: str, count: int) -> float:
    """Return the bytes for each parameter that steps of `count` microbatches a rank add."""
    pardata.init(device="cpu")
    contest = Contest(wide_net, IMAGES, 8 * count, 4)
    torch.manual_seed(0)
    model = made(contest, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = batches(contest, 6)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for batch in loader:
        optimizer.zero_grad()
        pardata.backward(model, mean_loss, batch)
        optimizer.step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return peak * 1024 / sum(p.numel() for p in model.parameters())  # Linux counts in kB


def compare(name: str, args: argparse.Namespace) -> list[Row]:
    """Let both strategies compete; return two rows for each quantity."""
    report = run(compete, name, args.rounds, world_size=2, timeout=3600)[0]
    ddp, exact = (torch.tensor(report["weights"][who]) for who in STRATEGIES)
    # Batch norm differs: ddp takes rank 0's statistics, which train nothing, and Adam amplifies.
    near = torch.allclose(ddp.norm(), exact.norm(), rtol=1e-2)
    require(holds=near, what="their weights differ")
    rows = []
    for quantity in QUANTITIES:
        used = report["used"][quantity]
        target = NETS[name].target if quantity == QUANTITIES[0] else ""
        pair = Row("ddp", used["ddp"]), Row.compare(used, "exact", "ddp", target)
        rows += [replace(row, name=f"{quantity}, {row.name}") for row in pair]
    return rows


def memory(count: int) -> list[Row]:
    """Measure both strategies in fresh processes; return their rows."""
    found = {who: [run(remember, who, count, world_size=2)[0]] for who in STRATEGIES}
    target = "exact, bytes a parameter" if count > 1 else ""
    return [Row("ddp", found["ddp"]), Row("exact", found["exact"], target=target)]


def main() -> None:
    """Measure each net and print the tables."""
    arguments = parser(__doc__, 16, "steps of each strategy, in turns")
    arguments.add_argument(
        "--nets", nargs="+", choices=NETS, default=list(NETS), help="which (default: all)"
    )
    args = arguments.parse_args()
    report = Report(__file__, args.save)
    for name in args.nets:
        contest = NETS[name]
        title = (
            f"{name}, 2 processes, batches of {contest.batch_size} in microbatches of "
            f"{contest.microbatch_size}"
        )
        report.add(title, "", compare(name, args))
    for count in (1, 4):
        title = f"bytes a parameter that a step adds, microbatches on each of 2 ranks: {count}"
        report.add(title, "", memory(count))
    report.save()


if __name__ == "__main__":
    main()
