"""What wrap_model adds to a training step, over the hand-written equivalent.

    python benchmarks/step_overhead.py
    python benchmarks/step_overhead.py --rounds 50 --nets mlp

Nets so small that a step is mostly overhead, batch 32 a process, SGD. Two processes: "ddp" against
DistributedDataParallel. One process: "auto" and "none" against the bare module; and DDP, where no
message hides what the wrapper adds. With batch norm there are buffers, which DDP broadcasts before
the forward and wrap_model after it. In each round every contender trains for a block of steps on
the same batches; at the end all must hold the same parameters, to the bit. "again" is the
reference a second time: how far its ratio is from 1 is the noise of the machine.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from _measure import Report, Row, alternate, parser, positive, require
from _nets import SMALL_NETS
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from pardata import check_in_sync, unwrap, wrap_model
from pardata.testing import run

DDP = "DistributedDataParallel"
OURS = 'wrap_model(..., "ddp")'
BARE = "bare module"
NOT_SLOWER = "step of wrap_model"

Wrap = Callable[[nn.Module], nn.Module]

TWO_RANKS: dict[str, Wrap] = {
    DDP: DistributedDataParallel,
    "DDP again": DistributedDataParallel,
    OURS: partial(wrap_model, strategy="ddp", device="cpu"),
}
ONE_RANK: dict[str, Wrap] = {
    BARE: lambda model: model,
    "bare module again": lambda model: model,
    'wrap_model(..., "none")': partial(wrap_model, strategy="none", device="cpu"),
    'wrap_model(..., "auto")': partial(wrap_model, device="cpu"),
    DDP: DistributedDataParallel,
    OURS: partial(wrap_model, strategy="ddp", device="cpu"),
}


class Contender:
    """A model, its optimizer, and a block of steps."""

    def __init__(self, net: str, wrap: Wrap, batches: list[tuple[Tensor, Tensor]]) -> None:
        torch.manual_seed(0)
        self.model = wrap(nn.Sequential(*SMALL_NETS[net][1]()))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self._batches = batches

    def block(self) -> float:
        """Train on every batch once; return the microseconds of a step."""
        dist.barrier()
        start = time.perf_counter()
        for inputs, targets in self._batches:
            self._optimizer.zero_grad()
            cross_entropy(self.model(inputs), targets).backward()
            self._optimizer.step()
        return (time.perf_counter() - start) / len(self._batches) * 1e6

    def state(self) -> list[Tensor]:
        """Return the parameters, and on rank 0 the buffers, which DDP takes from there."""
        model = unwrap(self.model)
        return [*model.parameters(), *(model.buffers() if dist.get_rank() == 0 else [])]


def measure(net: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Run on each rank: return the microseconds of a step of every contender and round."""
    noise = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        (torch.randn(32, 64, generator=noise), torch.randint(10, (32,), generator=noise))
        for _ in range(steps)
    ]
    wraps = ONE_RANK if dist.get_world_size() == 1 else TWO_RANKS
    contenders = {name: Contender(net, wrap, batches) for name, wrap in wraps.items()}
    blocks = {name: contender.block for name, contender in contenders.items()}
    alternate(blocks, rounds=1)  # DDP arranges its buckets after the first step
    times = alternate(blocks, rounds)
    _check_same_work(contenders)
    return times


def _check_same_work(contenders: dict[str, Contender]) -> None:
    reference = next(iter(contenders.values())).state()
    for name, contender in contenders.items():
        state = contender.state()
        same = len(state) == len(reference) and all(map(torch.equal, state, reference))
        require(holds=same, what=f"{name} ended with other parameters")
    if OURS in contenders:
        check_in_sync(contenders[OURS].model)


def main() -> None:
    """Measure each net at two processes and at one, and print the tables."""
    arguments = parser(__doc__, 400, "blocks of each contender")
    arguments.add_argument(
        "--steps", type=positive, default=10, help="steps of a block (default: 10)"
    )
    arguments.add_argument(
        "--nets",
        nargs="+",
        choices=SMALL_NETS,
        default=list(SMALL_NETS),
        help="which nets (default: all)",
    )
    args = arguments.parse_args()
    report = Report(__file__, args.save)
    for size in (2, 1):
        for net in args.nets:
            times = run(measure, net, args.rounds, args.steps, world_size=size, timeout=3600)[0]
            processes = "2 processes, gloo" if size == 2 else "1 process"
            blocks = f"{args.rounds} rounds of {args.steps} steps"
            title = f"Step of {SMALL_NETS[net][0]}: {processes}, {blocks}"
            report.add(title, "us a step", rows(times))
            print("parameters of all contenders: equal to the bit, on every rank", flush=True)
    report.save()


def rows(times: dict[str, list[float]]) -> list[Row]:
    """Compare every contender with the hand-written equivalent."""
    reference = next(iter(times))
    comparisons = {name: [reference] for name in times if name != reference}
    comparisons[OURS] = [DDP]  # in one process too, not the bare module
    found = [Row(reference, times[reference])]
    for name, others in comparisons.items():
        target = NOT_SLOWER if name.startswith("wrap_model") else ""
        found += [Row.compare(times, name, over, target) for over in others]
    return found


if __name__ == "__main__":
    main()
