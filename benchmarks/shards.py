"""What it costs to read shards through an index: to resume at 90 % of an epoch, and in between.

    python benchmarks/shards.py
    python benchmarks/shards.py --rounds 3 --formats tar LitData
    python benchmarks/shards.py --save

100,000 samples of 1 to 3 kB in 100 shards: tar files, Parquet, Arrow files and chunks of LitData.
They are not decoded, and read in one process without workers. pardata reads them by number, through
the classes of docs/howto-shards.md, datasets or wids. Next to it: the library's own loader, which
resumes from its state where it has one and else reads again, and PyTorch's DataLoader of the same
samples by number, which reads again. All shuffle. Before that, 1, 2 and 3 ranks resume where one
process stopped: together they must yield the rest of its epoch, and read each sample once.
Libraries take part where they are installed.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

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
from _shards import BATCH, FORMATS, Batch, Format
from torch.utils.data import Dataset

from pardata import Loader, make_loader
from pardata.testing import run

OURS, SAME = "pardata", "DataLoader"
RESUME, RATE = Reach(0.1), Reach(0.97, at_least=True)
SIZES = 1, 2, 3

Make = Callable[[], Iterable[Batch]]
State = dict[str, Any]


class Counted(Dataset[Any]):
    """A dataset that counts the samples that are read of it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.read = dataset, 0
        if hasattr(dataset, "__getitems__"):
            self.__class__ = CountedWhole

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self.dataset[index]


class CountedWhole(Counted):
    """The same, of a dataset that reads several samples at once."""

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the samples with these numbers."""
        self.read += len(indices)
        return self.dataset.__getitems__(indices)


def ours(form: Format, dataset: Any) -> Loader:
    """Return pardata's loader of what is read by number."""
    how = {"shuffle": True, "seed": 0, "num_workers": 0, "collate_fn": form.collate}
    return make_loader(dataset, BATCH, **how)


def until(share: float, samples: int) -> int:
    """Return after how many batches this share of an epoch is done."""
    return int(share * (samples // BATCH))


# --- the same samples, each read once, on 1, 2 and 3 ranks


def begun(form: Format, dataset: Any) -> tuple[State, list[list[int]]]:
    """Return the state at 90 % of an epoch, and the numbers in each step of the rest."""
    loader, steps, state = ours(form, dataset), [], {}
    for _, numbers in loader:
        steps.append(numbers.tolist())
        if len(steps) == until(0.9, len(dataset)):
            state = loader.state_dict()
    return state, steps[until(0.9, len(dataset)) :]


def rest(name: str, folder: Path, state: State) -> tuple[list[list[int]], int]:
    """Run on each rank: return its numbers in each step that is left, and how many it read."""
    form = FORMATS[name]
    counted = Counted(form.opened(folder))
    loader = ours(form, counted)
    loader.load_state_dict(state)
    return [numbers.tolist() for _, numbers in loader], counted.read


def check(name: str, folder: Path, dataset: Any) -> State:
    """Stop where ranks that resume yield something else, or read a sample twice."""
    state, expected = begun(FORMATS[name], dataset)
    for size in SIZES:
        shares, counts = zip(
            *run(rest, name, folder, state, world_size=size, timeout=600), strict=True
        )
        steps = [list(chain.from_iterable(step)) for step in zip(*shares, strict=True)]
        require(holds=steps == expected, what=f"{size} ranks resume {name} at other samples")
        # To find out whether a dataset has a generator of its own, rank 0 reads one sample twice.
        read, left = sum(counts), sum(map(len, expected))
        require(holds=left <= read <= left + 2, what=f"{size} ranks read {read} of {left} samples")
    print(f"{name}: the last {left:,} samples on 1, 2 and 3 ranks: the same, each read once")
    return state


# --- how long it takes


def seconds(action: Callable[[], Any]) -> float:
    """Return how long it takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def resumed(make: Make, state: State | None, batches: int) -> None:
    """Get the batch after so many from a new loader: by its state, or by reading again."""
    loader: Any = make()
    if state is not None:
        loader.load_state_dict(state)
    next(iter(loader) if state is not None else islice(loader, batches, None), None)


class Stream:
    """The batches of a loader, epoch after epoch."""

    def __init__(self, make: Make, batches: int) -> None:
        self._make, self._count = make, batches
        self._batches = self._endless()
        next(self._batches)

    def _endless(self) -> Any:
        loader = self._make()
        while True:
            yield from loader

    def rate(self) -> float:
        """Return the samples a second of the next batches."""
        took = seconds(lambda: [len(numbers) for _, numbers in islice(self._batches, self._count)])
        return self._count * BATCH / took


def state_of(make: Make, batches: int) -> State | None:
    """Return the state of a loader after so many batches, if it has one."""
    loader: Any = make()
    if not hasattr(loader, "state_dict"):
        return None
    for number, _ in enumerate(loader, 1):
        if number == batches:
            return dict(loader.state_dict())
    raise AssertionError


def measure(name: str, folder: Path, args: argparse.Namespace) -> dict[str, list[Row]]:
    """Write the shards of one format and read them; return the rows of each table."""
    form = FORMATS[name]
    form.write(folder, args.samples, args.shards)
    once = seconds(lambda: form.opened(folder))
    dataset = form.opened(folder)
    makes: dict[str, Make] = {
        f"{OURS}: {name}": partial(ours, form, dataset),
        f"{SAME}: {name}": partial(form.by_data_loader, dataset),
    }
    if form.stream is not None:
        makes[form.own] = partial(form.stream, folder)
    batches = until(0.9, len(dataset))
    states = {who: state_of(make, batches) for who, make in makes.items()}
    states[f"{OURS}: {name}"] = check(name, folder, dataset)
    resumes = {
        who: partial(seconds, partial(resumed, make, states[who], batches))
        for who, make in makes.items()
    }
    took = alternate(resumes, args.rounds)
    streams = {who: Stream(make, args.batches) for who, make in makes.items()}
    rates = alternate({who: stream.rate for who, stream in streams.items()}, args.rounds)
    first, *others = makes
    judged = others[-1]  # the library's own, if it has one
    again = [seconds(lambda: form.opened(folder)) for _ in range(args.rounds)]
    return {
        "once": [Row(f"{name}: the first time", [once]), Row(f"{name}: each time", again)],
        "resume": [Row(who, took[who], reach=RESUME if who == first else None) for who in makes],
        "rate": [
            *(Row(who, rates[who]) for who in others),
            *(Row.compare(rates, first, who, RATE if who == judged else None) for who in others),
        ],
    }


def arguments() -> argparse.ArgumentParser:
    """Return what can be said on the command line."""
    made = parser(__doc__, 5, "measurements of each contender")
    made.add_argument("--samples", type=positive, default=100_000, help="(default: 100,000)")
    made.add_argument("--shards", type=positive, default=100, help="(default: 100)")
    made.add_argument(
        "--batches", type=positive, default=100, help=f"of {BATCH} in a measurement (default: 100)"
    )
    made.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    made.add_argument(
        "--directory",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="on the disk for the shards, for as long as this runs (default: %(default)s)",
    )
    return made


def main() -> None:
    """Measure each format and print the tables."""
    args = arguments().parse_args()
    about = print_environment()
    rows: dict[str, list[Row]] = {"once": [], "resume": [], "rate": []}
    for name in args.formats:
        if missing := FORMATS[name].missing():
            print(f"{name} takes no part: {', '.join(missing)} not installed", flush=True)
            continue
        with tempfile.TemporaryDirectory(dir=args.directory) as folder:
            for table, found in measure(name, Path(folder), args).items():
                rows[table] += found
    what = f"{args.samples:,} samples in {args.shards} shards"
    titles = {
        "once": (f"{what}: to open them", "s"),
        "resume": (f"{what}: to the first batch of {BATCH} at 90 %, {args.rounds} times", "s"),
        "rate": (f"{what}: batches of {BATCH}, {args.rounds} rounds", "samples/s"),
    }
    for table, (title, unit) in titles.items():
        print_table(title, unit, rows[table])
    if args.save:
        save(args.save, __file__, about, {titles[table][0]: rows[table] for table in titles})


if __name__ == "__main__":
    main()
