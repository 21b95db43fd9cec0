"""What a step of the README's loop costs, over the loops that people write by hand.

    python benchmarks/training_loop.py
    python benchmarks/training_loop.py --rounds 20 --nets mlp
    python benchmarks/training_loop.py --save

The loop as the README has it: `backward`, which returns the loss of the global batch, with a plain
batch and with Microbatches, and in two processes under strategy "exact" too. Beside it, in one
process, the plain loop; in two, DistributedDataParallel whose loss is reduced in each step, which
knows as much, and DistributedDataParallel that knows only its own rank's loss; and Accelerate,
Fabric and Ignite, where installed. All train on the same batches of make_loader, with SGD, in
blocks of steps that take turns, and must end with the same weights, up to rounding. A net whose
step takes a third of a millisecond, one with batch norm, and that of articles/mnist.py. "again" is
the reference a second time: how far its ratio is from 1 is the noise of the machine.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from _nets import conv_net
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
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

PLAIN, OWN_LOSS, MEAN_LOSS = "plain loop", "DDP", "DDP, loss reduced"
OURS, IN_PIECES = "README's loop", "README's loop, Microbatches"
EXACT = "README's loop, exact"
SAMPLES = 32  # a rank and step

NETS: dict[str, tuple[str, Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "mlp": ("MLP 64-64-10", lambda: [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)], (64,)),
    "batch-norm": (
        "MLP 64-64-10 with batch norm",
        lambda: [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)],
        (64,),
    ),
    # Its dropout draws other numbers under each loop: they could not be compared.
    "mnist": (
        "net of examples/articles/mnist.py without dropout",
        lambda: [part for part in conv_net() if not isinstance(part, nn.Dropout)],
        (1, 28, 28),
    ),
}
REACH = {
    ("mlp", PLAIN): Reach(1.1),
    ("mnist", PLAIN): Reach(1.01),
    ("mlp", MEAN_LOSS): Reach(1.0),
    ("mlp", OWN_LOSS): Reach(1.15),
    ("mnist", MEAN_LOSS): Reach(1.01),
    ("mnist", OWN_LOSS): Reach(1.01),
}

Block = Callable[[Iterable[Any]], object]


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of a batch."""
    x, y = batch
    return cross_entropy(model(x), y)


def by_hand(model: nn.Module, *, reduces: bool) -> tuple[nn.Module, Block]:
    """Return the loop that people write: with DistributedDataParallel on several ranks."""
    size = world().size
    trained = DistributedDataParallel(model) if size > 1 else model
    optimizer = sgd(trained)

    def block(batches: Iterable[Any]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss = mean_loss(trained, batch)
            loss.backward()
            optimizer.step()
            if reduces:
                loss = loss.detach() / size
                dist.all_reduce(loss)

    return trained, block


def readme(model: nn.Module, strategy: str = "auto") -> tuple[nn.Module, Block]:
    """Return the loop of the README."""
    trained = wrap_model(model, strategy, device="cpu")
    optimizer = sgd(trained)

    def block(batches: Iterable[Any]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            backward(trained, mean_loss, batch)
            optimizer.step()

    return trained, block


def accelerate(model: nn.Module) -> tuple[nn.Module, Block]:
    """Return the loop of Accelerate's documentation."""
    from accelerate import Accelerator  # noqa: PLC0415  # optional

    accelerator = Accelerator(cpu=True)
    trained, optimizer = accelerator.prepare(model, sgd(model))

    def block(batches: Iterable[Any]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(mean_loss(trained, batch))
            optimizer.step()

    return trained, block


def fabric(model: nn.Module) -> tuple[nn.Module, Block]:
    """Return the loop of Fabric's documentation."""
    from lightning_fabric import Fabric  # noqa: PLC0415  # optional

    size = world().size
    used = Fabric(accelerator="cpu", devices=size, strategy="ddp" if size > 1 else "auto")
    used.launch()
    trained, optimizer = used.setup(model, sgd(model))

    def block(batches: Iterable[Any]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            used.backward(mean_loss(trained, batch))
            optimizer.step()

    return trained, block


def ignite(model: nn.Module) -> tuple[nn.Module, Block]:
    """Return the loop of Ignite's documentation."""
    from ignite import distributed as idist  # noqa: PLC0415  # optional
    from ignite.engine import create_supervised_trainer  # noqa: PLC0415  # as above

    trained = idist.auto_model(model)
    trainer = create_supervised_trainer(trained, idist.auto_optim(sgd(trained)), cross_entropy)
    return trained, lambda batches: trainer.run(batches, max_epochs=1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of every loop."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def contenders() -> dict[str, Callable[[nn.Module], tuple[nn.Module, Block]]]:
    """Return what starts each loop, but for those of libraries that are not installed."""
    own, mean = partial(by_hand, reduces=False), partial(by_hand, reduces=True)
    hand = {OWN_LOSS: own, "DDP again": own, MEAN_LOSS: mean}
    found = hand if world().size > 1 else {PLAIN: own, "plain loop again": own}
    found |= {OURS: readme, IN_PIECES: readme}
    if world().size > 1:
        found[EXACT] = partial(readme, strategy="exact")
    peers = {"accelerate": accelerate, "lightning_fabric": fabric, "ignite": ignite}
    missing = [name for name in peers if find_spec(name) is None]
    if missing and world().is_main:
        print(f"not installed, so that they take no part: {', '.join(missing)}", flush=True)
    return found | {name: start for name, start in peers.items() if name not in missing}


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


def as_rank(args: Any) -> None:
    """Measure as one of the ranks that `main` starts; rank 0 leaves the numbers in a file."""
    torch.set_num_threads(1)
    with init(device="cpu") as here:  # alone too, as in the README
        found = {net: measure(net, args.rounds, args.steps) for net in args.nets}
        if here.is_main:
            args.write.write_text(json.dumps(found))


def started(size: int, args: Any) -> dict[str, dict[str, list[float]]]:
    """Start so many ranks, several by torchrun, as a user of any of the libraries does."""
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory) / "times.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command = [
            *(sys.executable, *(torchrun if size > 1 else []), __file__, "--write", str(told)),
            *("--rounds", str(args.rounds), "--steps", str(args.steps), "--nets", *args.nets),
        ]
        subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})
        found: dict[str, dict[str, list[float]]] = json.loads(told.read_text())
        return found


def main() -> None:
    """Measure each net at two processes and at one, and print the tables."""
    arguments = parser(__doc__, 400, "blocks of each contender")
    arguments.add_argument(
        "--steps", type=positive, default=10, help="steps of a block (default: 10)"
    )
    arguments.add_argument(
        "--nets", nargs="+", choices=NETS, default=list(NETS), help="which nets (default: all)"
    )
    arguments.add_argument("--write", type=Path, help="of the ranks that this script starts itself")
    args = arguments.parse_args()
    if args.write:
        as_rank(args)
        return
    about = print_environment()
    tables = {}
    for size in (2, 1):
        for net, times in started(size, args).items():
            processes = "2 processes, gloo" if size == 2 else "1 process"
            blocks = f"{args.rounds} rounds of {args.steps} steps"
            title = f"Step of {NETS[net][0]}: {processes}, {blocks}"
            tables[title] = rows(net, times)
            print_table(title, "us a step", tables[title])
    if args.save:
        save(args.save, __file__, about, tables)


def rows(net: str, times: dict[str, list[float]]) -> list[Row]:
    """Compare every contender with those by hand."""
    references = [name for name in (PLAIN, OWN_LOSS, MEAN_LOSS) if name in times]
    found = [Row(references[0], times[references[0]])]
    for name in times:
        is_ours = name in (OURS, IN_PIECES, EXACT)
        for reference in references if is_ours else references[:1]:
            if name != reference:
                reach = REACH.get((net, reference)) if is_ours else None
                if (net, reference, name) == ("mlp", OWN_LOSS, EXACT):
                    reach = Reach(1.0)
                found.append(Row.compare(times, name, reference, reach))
    return found


if __name__ == "__main__":
    main()
