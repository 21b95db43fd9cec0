"""What a slow network makes of a training step, and which options of wrap_model help.

    python benchmarks/slow_link.py
    python benchmarks/slow_link.py --rate-mbit 1000 --delay-ms 1

Two ranks on two hosts (network namespaces on this machine) with a slow link between them train a
perceptron of 1.6 million parameters, 6.3 MB of gradients, 32 samples a microbatch on each rank. All
contenders take turns within a round, and what is compared is the time for the same number of
samples. With more microbatches a synchronisation there are fewer optimizer steps for them: the
global batch is larger, which is another training run. At the end every contender's replicas must
still be equal. Needs Linux, root, iproute2 and /dev/net/tun.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _measure import (
    Row,
    alternate,
    parser,
    positive,
    print_environment,
    print_table,
    save,
)
from _slow_network import ADDRESSES, DEVICE, missing, on_host, slow_link
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import pardata

MICROBATCH = 32  # on each rank
WIDTHS = (512, 1024, 1024, 10)
PLAIN = 'wrap_model(..., "ddp")'

Wrap = Callable[[nn.Module], nn.Module]


def hooked(hook: Callable[..., Any], model: nn.Module) -> nn.Module:
    """Wrap `model` as ever, and send its gradients in another form."""
    wrapped = pardata.wrap_model(model, "ddp", device="cpu")
    wrapped.register_comm_hook(None, hook)
    return wrapped


def optioned(model: nn.Module, **options: Any) -> nn.Module:
    """Wrap `model` with options of DDP."""
    return pardata.wrap_model(model, "ddp", device="cpu", **options)


# Each with the microbatches of a step.
CONTENDERS: dict[str, tuple[Wrap, int]] = {
    PLAIN: (optioned, 1),
    "again": (optioned, 1),
    "bucket_cap_mb=1": (partial(optioned, bucket_cap_mb=1), 1),
    "bucket_cap_mb=100": (partial(optioned, bucket_cap_mb=100), 1),
    "bf16 hook": (partial(hooked, bf16_compress_hook), 1),
    "fp16 hook": (partial(hooked, fp16_compress_hook), 1),
    "2 microbatches a step": (optioned, 2),
    "4 microbatches a step": (optioned, 4),
    "4 microbatches, bf16 hook": (partial(hooked, bf16_compress_hook), 4),
}


class Contender:
    """A wrapped model, its optimizer, and the samples of a block."""

    def __init__(self, wrap: Wrap, microbatches: int, samples: int) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for wide, narrow in itertools.pairwise(WIDTHS):
            layers += [nn.Linear(wide, narrow), nn.ReLU()]
        self.model = wrap(nn.Sequential(*layers[:-1]))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(samples, WIDTHS[0]), torch.randint(10, (samples,)))
        size = MICROBATCH * pardata.world().size * microbatches
        self._batches = list(pardata.make_loader(data, size, microbatch_size=MICROBATCH, seed=0))

    def block(self) -> float:
        """Train on every sample once; return the milliseconds."""
        pardata.barrier()
        start = time.perf_counter()
        for batch in self._batches:
            self._optimizer.zero_grad()
            pardata.backward(self.model, _mean_loss, batch)
            self._optimizer.step()
        return (time.perf_counter() - start) * 1e3


def _mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def measure(rounds: int) -> None:
    """Run on each rank; rank 0 prints the milliseconds of every contender and round, as JSON."""
    with pardata.init(device="cpu") as here:
        torch.set_num_threads(1)
        most = max(microbatches for _, microbatches in CONTENDERS.values())
        samples = MICROBATCH * here.size * most
        contenders = {
            name: Contender(wrap, microbatches, samples)
            for name, (wrap, microbatches) in CONTENDERS.items()
        }
        blocks = {name: contender.block for name, contender in contenders.items()}
        alternate(blocks, rounds=1)  # DDP arranges its buckets after the first step
        times = alternate(blocks, rounds)
        for contender in contenders.values():
            pardata.check_in_sync(contender.model)
        if here.is_main:
            print(json.dumps({"samples": samples, "times": times}), flush=True)


def over_the_link(delay_ms: float, rate_mbit: float, rounds: int) -> dict[str, Any]:
    """Start a rank on each of two hosts; return what rank 0 measured."""
    with slow_link(delay_ms, rate_mbit) as hosts:
        ranks = [
            subprocess.Popen(
                on_host(host, sys.executable, __file__, "--as-rank", "--rounds", str(rounds)),
                stdout=subprocess.PIPE,
                env={**os.environ, **_variables(rank, len(hosts))},
                text=True,
            )
            for rank, host in enumerate(hosts)
        ]
        try:
            printed = [rank.communicate()[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(rank.returncode for rank in ranks):
            sys.exit("a rank failed")
    found: dict[str, Any] = json.loads(printed[0].splitlines()[-1])
    return found


def _variables(rank: int, size: int) -> dict[str, str]:
    """Return what torchrun would set, one rank on each host."""
    numbers = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1,
        "GROUP_RANK": rank, "GROUP_WORLD_SIZE": size,
        "MASTER_PORT": 29400,  # the namespaces are ours alone
    }  # fmt: skip
    texts = {name: str(value) for name, value in numbers.items()}
    return {**texts, "MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": DEVICE}


def main() -> None:
    """Measure over the link that was asked for, and print the table."""
    arguments = parser(__doc__, 20, "blocks of each contender")
    arguments.add_argument("--delay-ms", type=float, default=5, help="one way (default: 5)")
    arguments.add_argument(
        "--rate-mbit", type=positive, default=100, help="each way, a second (default: 100)"
    )
    arguments.add_argument("--as-rank", action="store_true", help="run as one of the ranks")
    args = arguments.parse_args()
    if args.as_rank:
        measure(args.rounds)
        return
    if lack := missing():
        sys.exit(f"two hosts on one machine: {lack}")
    about = print_environment()
    found = over_the_link(args.delay_ms, args.rate_mbit, args.rounds)
    times = found["times"]
    rows = [Row(PLAIN, times[PLAIN])]
    rows += [Row.compare(times, name, PLAIN) for name in times if name != PLAIN]
    link = f"{args.rate_mbit} Mbit/s, {args.delay_ms:g} ms each way"
    title = f"{found['samples']} samples over {link}: 2 ranks on 2 hosts, {args.rounds} rounds"
    print_table(title, "ms", rows)
    if args.save:
        save(args.save, __file__, about, {title: rows})


if __name__ == "__main__":
    main()
