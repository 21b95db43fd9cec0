"""What a step of the README's loop costs, over the loops that people write by hand.

    python benchmarks/training_loop.py
    python benchmarks/training_loop.py --rounds 20 --nets mlp
    python benchmarks/training_loop.py --save

The loop as the README has it: `backward`, which returns the loss of the global batch, with a plain
batch and with Microbatches, and in two processes under strategy "exact" too. Beside it, in one
process, the plain loop; in two, DistributedDataParallel whose loss is reduced in each step, which
knows as much, and DistributedDataParallel that knows only its own rank's loss. All train on the
same batches of make_loader, with SGD, in blocks of steps that take turns, and must end with the
same weights, up to rounding. A net whose step takes a third of a millisecond, one with batch norm,
and that of articles/mnist.py. "again" is the reference a second time: how far its ratio is from 1
is the noise of the machine.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _measure import Report, Row, alternate, parser, positive, require
from _nets import SMALL_NETS, Block, conv_net, mean_loss, trained_by
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from pardata import (
    Loader,
    all_reduce_mean,
    backward,
    barrier,
    init,
    make_loader,
    unwrap,
    world,
    wrap_model,
)
from pardata.testing import run

PLAIN, OWN_LOSS, MEAN_LOSS = "plain loop", "DDP", "DDP, loss reduced"
OURS, IN_PIECES = "README's loop", "README's loop, Microbatches"
EXACT = "README's loop, exact"
SAMPLES = 32  # a rank and step

NETS: dict[str, tuple[str, Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    **{name: (*net, (64,)) for name, net in SMALL_NETS.items()},
    # Its dropout draws other numbers under each loop: they could not be compared.
    "mnist": (
        "net of examples/articles/mnist.py without dropout",
        lambda: [part for part in conv_net() if not isinstance(part, nn.Dropout)],
        (1, 28, 28),
    ),
}
TARGETS = {
    ("mlp", PLAIN): "README's loop, MLP, 1 process",
    ("mnist", PLAIN): "README's loop, MNIST net, 1 process",
    ("mlp", MEAN_LOSS): "README's loop, MLP, 2 processes",
    ("mnist", MEAN_LOSS): "README's loop, MNIST net, 2 processes",
}


def by_hand(model: nn.Module, *, reduces: bool) -> tuple[nn.Module, Block]:
    """Return the loop that people write: with DistributedDataParallel on several ranks."""
    size = world().size
    trained = DistributedDataParallel(model) if size > 1 else model

    def hand(model: nn.Module, batch: Any) -> None:
        loss = mean_loss(model, batch)
        loss.backward()
        if reduces:
            loss = loss.detach() / size
            dist.all_reduce(loss)

    return trained, trained_by(trained, hand)


def readme(model: nn.Module, strategy: str = "auto") -> tuple[nn.Module, Block]:
    """Return the loop of the README."""
    trained = wrap_model(model, strategy, device="cpu")
    return trained, trained_by(trained, lambda model, batch: backward(model, mean_loss, batch))


def contenders() -> dict[str, Callable[[nn.Module], tuple[nn.Module, Block]]]:
    """Return what starts each loop."""
    own, mean = partial(by_hand, reduces=False), partial(by_hand, reduces=True)
    hand = {OWN_LOSS: own, "DDP again": own, MEAN_LOSS: mean}
    found = hand if world().size > 1 else {PLAIN: own, "plain loop again": own}
    found |= {OURS: readme, IN_PIECES: readme}
    if world().size > 1:
        found[EXACT] = partial(readme, strategy="exact")
    return found


def measure(net: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the microseconds of a step of every contender and round, the mean of all ranks'."""
    plain, pieces = (loader_of(net, steps, size) for size in (None, SAMPLES))
    blocks = {}
    models = {}
    for name, start in contenders().items():
        torch.manual_seed(0)
        models[name], block = start(nn.Sequential(*NETS[net][1]()))
        blocks[name] = partial(timed, block, pieces if name in (IN_PIECES, EXACT) else plain, steps)
    alternate(blocks, rounds=1)  # DDP arranges its buckets after the first step
    times = alternate(blocks, rounds)
    _check_same_work(models)
    return times


def loader_of(net: str, steps: int, microbatch_size: int | None) -> Loader:
    """Return a loader of the same few steps in each epoch."""
    noise = torch.Generator().manual_seed(0)
    batch = SAMPLES * world().size
    images = torch.randn(batch * steps, *NETS[net][2], generator=noise)
    data = TensorDataset(images, torch.randint(10, (batch * steps,), generator=noise))
    return make_loader(data, batch, microbatch_size=microbatch_size, num_workers=0, device="cpu")


def timed(block: Block, loader: Loader, steps: int) -> float:
    """Train for an epoch; return the microseconds of a step."""
    # Read before: what a loader costs is measured elsewhere.
    batches = list(loader)
    barrier()
    start = time.perf_counter()
    block(batches)
    took = (time.perf_counter() - start) / steps * 1e6
    return float(all_reduce_mean(took))


def _check_same_work(models: dict[str, nn.Module]) -> None:
    states = {
        name: list(unwrap(getattr(m, "module", m)).parameters()) for name, m in models.items()
    }
    reference = next(iter(states.values()))
    for name, state in states.items():
        same = all(torch.allclose(*pair, atol=1e-4) for pair in zip(state, reference, strict=True))
        require(holds=same, what=f"{name} ended with other parameters")


def as_rank(nets: list[str], rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    """Measure each net as one of the ranks."""
    torch.set_num_threads(1)
    with init(device="cpu"):
        return {net: measure(net, rounds, steps) for net in nets}


def main() -> None:
    """Measure each net at two processes and at one, and print the tables."""
    arguments = parser(__doc__, 80, "blocks of each contender")
    arguments.add_argument(
        "--steps", type=positive, default=10, help="steps of a block (default: 10)"
    )
    arguments.add_argument(
        "--nets", nargs="+", choices=NETS, default=list(NETS), help="which nets (default: all)"
    )
    args = arguments.parse_args()
    report = Report(__file__, args.save)
    for size in (2, 1):
        given = args.nets, args.rounds, args.steps
        # Alone without a group, as in the README.
        alone = size == 1
        found = as_rank(*given) if alone else run(as_rank, *given, world_size=size, timeout=3600)[0]
        for net, times in found.items():
            processes = "2 processes, gloo" if size == 2 else "1 process"
            blocks = f"{args.rounds} rounds of {args.steps} steps"
            title = f"Step of {NETS[net][0]}: {processes}, {blocks}"
            report.add(title, "us a step", rows(net, times))
    report.save()


def rows(net: str, times: dict[str, list[float]]) -> list[Row]:
    """Compare every contender with those by hand."""
    references = [name for name in (PLAIN, OWN_LOSS, MEAN_LOSS) if name in times]
    found = [Row(references[0], times[references[0]])]
    for name in times:
        is_ours = name in (OURS, IN_PIECES, EXACT)
        for reference in references if is_ours else references[:1]:
            if name != reference:
                has_target = is_ours and name != EXACT
                target = TARGETS.get((net, reference), "") if has_target else ""
                found.append(Row.compare(times, name, reference, target))
    return found


if __name__ == "__main__":
    main()
