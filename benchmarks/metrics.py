"""What the mean of ten metrics over two processes costs.

    python benchmarks/metrics.py
    python benchmarks/metrics.py --rounds 100

all_reduce_mean of ten numbers, as a dict of floats and as a dict of tensors without dimensions,
against one bare all_reduce of ten floats, the least that two processes can do, and against one
all_reduce for each metric, as scripts do. In each round one call of each contender, right after a
barrier; every result is checked. Then all_reduce_mean in a single process.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _measure import Report, Row, alternate, parser, require
from torch import Tensor

from pardata import all_reduce_mean, init
from pardata.testing import run

BARE = "one bare all_reduce of ten floats"
EACH = "one all_reduce for each metric"
FLOATS = "all_reduce_mean of ten floats"
TENSORS = "all_reduce_mean of ten tensors"
NAMES = [f"metric {number}" for number in range(10)]


@dataclass(frozen=True)
class Contender:
    """One way to average: how it takes the metrics, which is not timed, and the call, which is."""

    take: Callable[[list[float]], Any]
    call: Callable[[Any], Any]


def bare_sum(vector: Tensor) -> Tensor:
    """Return the sums over all ranks, and nothing else."""
    dist.all_reduce(vector)
    return vector


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the means over all ranks as scripts do it by hand."""
    for tensor in tensors.values():
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())
    return tensors


def as_floats(metrics: list[float]) -> dict[str, float]:
    """Return the metrics by name, as numbers."""
    return dict(zip(NAMES, metrics, strict=True))


def as_tensors(metrics: list[float]) -> dict[str, Tensor]:
    """Return the metrics by name, as tensors without dimensions."""
    return {name: torch.tensor(metric) for name, metric in as_floats(metrics).items()}


CONTENDERS = {
    # The sum of halves is the mean: the division is not timed.
    BARE: Contender(lambda metrics: torch.tensor(metrics) / 2, bare_sum),
    EACH: Contender(as_tensors, one_by_one),
    FLOATS: Contender(as_floats, all_reduce_mean),
    TENSORS: Contender(as_tensors, all_reduce_mean),
}


def measure(rounds: int) -> dict[str, list[float]]:
    """Run on each of two ranks: return the microseconds of every contender and round."""
    init()  # as a user would
    calls = {name: partial(_one_call, name) for name in CONTENDERS}
    alternate(calls, rounds=10)  # connections and caches
    return alternate(calls, rounds)


def _one_call(name: str) -> float:
    # Multiples of an eighth: no sum of them rounds, in any precision.
    metrics = [number / 8 + dist.get_rank() for number in range(10)]
    contender = CONTENDERS[name]
    taken = contender.take(metrics)
    dist.barrier()
    start = time.perf_counter()
    result = contender.call(taken)
    seconds = time.perf_counter() - start
    means = list(result.values()) if isinstance(result, dict) else list(result)
    expected = [number / 8 + 0.5 for number in range(10)]
    require(holds=list(map(float, means)) == expected, what=f"{name} is {means}, not {expected}")
    return seconds * 1e6


def measure_alone(rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of a call in a single process, without a group."""
    return alternate({name: partial(_many_calls, name) for name in (FLOATS, TENSORS)}, rounds)


def _many_calls(name: str, calls: int = 100) -> float:
    taken = CONTENDERS[name].take([number / 8 for number in range(10)])
    require(holds=all_reduce_mean(taken) == taken, what=f"{name} changed them in one process")
    start = time.perf_counter()
    for _ in range(calls):
        all_reduce_mean(taken)
    return (time.perf_counter() - start) / calls * 1e6


def main() -> None:
    """Measure at two processes and in this one, and print the tables."""
    args = parser(__doc__, 400, "calls of each contender").parse_args()
    report = Report(__file__, args.save)
    times = run(measure, args.rounds, world_size=2, timeout=3600)[0]
    together = [
        Row(BARE, times[BARE]),
        Row.compare(times, FLOATS, BARE, "metrics, one call"),
        Row.compare(times, TENSORS, BARE, "metrics, one call"),
        Row.compare(times, EACH, FLOATS, "metrics, a call each"),
        Row.compare(times, EACH, TENSORS, "metrics, a call each"),
    ]
    title = f"Mean of ten metrics: 2 processes, gloo, {args.rounds} rounds"
    report.add(title, "us a call", together)
    print("means of all contenders: equal to the bit, on both ranks", flush=True)
    rounds_alone = max(2, args.rounds // 10)
    alone = [Row(name, values) for name, values in measure_alone(rounds_alone).items()]
    title_alone = f"Mean of ten metrics: a single process, {rounds_alone} rounds of 100 calls"
    report.add(title_alone, "us a call", alone)
    report.save()


if __name__ == "__main__":
    main()
