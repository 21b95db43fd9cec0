"""What a dataset costs in memory where several ranks read it, and what a sharded model does.

    python benchmarks/memory.py
    python benchmarks/memory.py --megabytes 4000 --ranks 8

One gigabyte of images, read through by 4 ranks with 2 workers each: from cache_dataset, and from a
TensorDataset in every rank. What is resident is the sum of the proportional set size of all ranks
and workers, in which a page that several share counts once: Pss in /proc/<pid>/smaps_rollup. Beside
it the same processes with the same batches, which are made as they are read; what is above that is
data, some number of copies. All ranks together read the same pixels, which is checked. Linux only.

Then a transformer of twelve blocks under "fsdp", sharded at its root alone and block by block: the
most bytes of parameters that a rank has gathered at once in a step, as hooks see them at the begin
and end of each module's forward and in its backward. No workers and no time.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from functools import partial
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
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.data import Dataset, TensorDataset

from pardata import all_reduce_sum, backward, cache_dataset, make_loader, wrap_model
from pardata.model._sharding import unsharded
from pardata.testing import run

SHAPE = 3, 64, 64
BYTES = 3 * 64 * 64
BATCH = 64
COPIES = Reach(1.1)
GATHERED = Reach(0.25)

MADE, CACHED = "made as they are read", "cache_dataset"
TENSORS = "TensorDataset in every rank"
ROOT, BLOCKS = "sharded at its root alone", 'blocks="auto"'


class Images(Dataset[tuple[Tensor, int]]):
    """Images of one brightness each, made when they are asked for."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full(SHAPE, index % 251, dtype=torch.uint8), index


class Batches(Images):
    """The same images, made by whole batches."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        numbers = torch.as_tensor(indices)
        brightness = (numbers % 251).to(torch.uint8).view(-1, 1, 1, 1)
        return brightness.expand(-1, *SHAPE).contiguous(), numbers


def dataset_of(name: str, length: int, directory: str) -> Dataset[Any]:
    """Return the images in one of the ways."""
    if name == MADE:
        return Batches(length)
    if name == CACHED:
        return cache_dataset(Images(length), directory)
    return TensorDataset(*Batches(length).__getitems__(list(range(length))))


def build(length: int, directory: str) -> None:
    """Make the cache."""
    cache_dataset(Images(length), directory)


def read(name: str, length: int, workers: int, directory: str) -> dict[str, Any]:
    """Run on each rank: read an epoch; return what all ranks and their workers have resident."""
    dataset = dataset_of(name, length, directory)
    # They persist, as they would until the next epoch.
    loader = make_loader(dataset, BATCH, shuffle=True, drop_last=False, seed=0, num_workers=workers)
    pixels = sum(int(images[:, 0, 0, 0].sum()) for images, _ in loader)
    processes = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
    dist.barrier()
    own = sum(proportional_set_size(pid) for pid in processes)
    dist.barrier()  # nobody ends, and makes of what it shared the others' own
    return all_reduce_sum({"MB": own, "pixels": pixels, "processes": len(processes)})


def proportional_set_size(pid: int | None) -> float:
    """Return megabytes (of a million bytes)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith("Pss:"))
    return int(size) * 1024 / 1e6


class Transformer(nn.Module):
    """Twelve blocks between an embedding and a head."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(12)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a score for each token."""
        states = self.embed(tokens)
        for block in self.blocks:
            states = block(states)
        scores: Tensor = self.head(states)
        return scores


def gathered(options: dict[str, str]) -> tuple[int, int]:
    """Run on each rank: do a step; return the bytes of all parameters, and the most gathered."""
    torch.manual_seed(0)
    net = Transformer()
    total = sum(parameter.nbytes for parameter in net.parameters())
    model = wrap_model(net, "fsdp", **options)
    seen = [0]

    def look(*_: object) -> None:
        # What is sharded again has memory no more.
        seen.append(sum(p.untyped_storage().nbytes() for p in unsharded(model)))

    def look_in_backward(_module: object, _inputs: object, output: Tensor) -> None:
        look()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(look)

    hooks = [
        register_module_forward_pre_hook(look),
        register_module_forward_hook(look_in_backward),
    ]
    tokens = torch.arange(32).view(2, 16) + 32 * dist.get_rank()
    backward(model, lambda m, batch: m(batch).square().mean(), tokens)
    for hook in hooks:
        hook.remove()
    return total, max(seen)


def compare_sharding(ranks: int) -> list[Row]:
    """Return the rows of what is gathered at once, as part of all parameters."""
    found: dict[str, list[float]] = {}
    for name, options in {ROOT: {}, BLOCKS: {"blocks": "auto"}}.items():
        ((total, most), *_) = run(gathered, options, world_size=ranks, timeout=3600)
        found[name] = [most / total]
    return [Row(ROOT, found[ROOT]), Row(BLOCKS, found[BLOCKS], reach=GATHERED)]


def measure(name: str, args: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Read in fresh processes; return what rank 0 of them reports."""
    how = name, samples(args), args.workers, directory
    return run(read, *how, world_size=args.ranks, timeout=3600)[0]


def samples(args: argparse.Namespace) -> int:
    """Return how many images there are."""
    return args.megabytes * 1_000_000 // BYTES


def compare(args: argparse.Namespace, directory: str) -> tuple[list[Row], list[Row]]:
    """Measure all in turns; return the rows of megabytes, and those of copies."""
    names = MADE, CACHED, TENSORS
    found = alternate(
        {name: partial(measure, name, args, directory) for name in names}, args.rounds
    )
    check(found, args)
    resident = {name: [report["MB"] for report in reports] for name, reports in found.items()}
    total = samples(args) * BYTES / 1e6
    copies = {
        name: [(used - none) / total for used, none in zip(values, resident[MADE], strict=True)]
        for name, values in resident.items()
    }
    return [Row(name, resident[name]) for name in names], [
        Row(CACHED, copies[CACHED], reach=COPIES),
        Row(TENSORS, copies[TENSORS]),
    ]


def check(found: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> None:
    """Stop where somebody read something else, or in other processes."""
    expected = int((torch.arange(samples(args)) % 251).sum())
    for name, reports in found.items():
        for report in reports:
            processes = args.ranks * (1 + args.workers)
            seen = int(report["processes"])
            require(holds=seen == processes, what=f"{name} had {seen} processes, not {processes}")
            require(holds=int(report["pixels"]) == expected, what=f"{name} read other pixels")


def arguments() -> argparse.ArgumentParser:
    """Return what can be said on the command line."""
    made = parser(__doc__, 3, "fresh runs of each contender")
    made.add_argument("--megabytes", type=positive, default=1000, help="of images (default: 1000)")
    made.add_argument("--ranks", type=positive, default=4, help="processes (default: 4)")
    made.add_argument("--workers", type=positive, default=2, help="of each rank (default: 2)")
    made.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="on the disk for the cache, for as long as this runs (default: %(default)s)",
    )
    return made


def main() -> None:
    """Measure each contender and print the tables."""
    made = arguments()
    args = made.parse_args()
    if not Path("/proc/self/smaps_rollup").exists():
        sys.exit("what is resident is read from /proc/<pid>/smaps_rollup, which is not here")
    if samples(args) < BATCH:
        made.error(f"--megabytes must be {BATCH * BYTES // 1_000_000 + 1} or more, for one batch")
    about = print_environment()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        # In a process like the others, to which this script has another name than to this one.
        run(build, samples(args), directory, world_size=1, timeout=3600)
        resident, copies = compare(args, directory)
    what = f"{args.megabytes} MB of images, {args.ranks} ranks with {args.workers} workers each"
    sharded = "a transformer under fsdp: the most parameters that are gathered at once"
    tables = {
        f"{what}: resident, all processes together, {args.rounds} runs": resident,
        f"{what}: copies of the data, {args.rounds} runs": copies,
        f"{sharded}, {args.ranks} ranks": compare_sharding(args.ranks),
    }
    for (title, rows), unit in zip(tables.items(), ["MB", "copies", "of all"], strict=True):
        print_table(title, unit, rows)
    print("pixels read by all ranks together: the same", flush=True)
    if args.save:
        save(args.save, __file__, about, tables)


if __name__ == "__main__":
    main()
