"""What the benchmarks share: alternated rounds, ratios, a table, and the machine they ran on.

A machine changes its speed from minute to minute. So the contenders take turns within each round,
and what counts is the median, over the rounds, of the ratio within a round. The column "+-" says
how far chance may have moved that.
"""

import argparse
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

_T = TypeVar("_T")

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Reach:
    """The number to reach: at most `limit`, or at least that; or never, in a dry run."""

    limit: float
    at_least: bool = False
    is_dry: bool = False

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:g}"

    def verdict(self, value: float, noise: float) -> str:
        """Return in words whether `value` is good enough, and whether that may be chance."""
        if self.is_dry or math.isnan(value):
            return "not measured"
        reached = value >= self.limit if self.at_least else value <= self.limit
        text = "reached" if reached else "NOT REACHED"
        return f"{text}, within the noise" if abs(value - self.limit) <= noise else text


@dataclass(frozen=True)
class Row:
    """One line of a table: a quantity, and its ratio to that of another contender.

    Attributes:
        name: of the contender.
        values: one of each round.
        over: the contender to which the ratios are.
        ratios: one of each round; none where nothing is compared.
        reach: what the ratio is held against, or, where there is none, the value.
    """

    name: str
    values: Sequence[float]
    over: str = ""
    ratios: Sequence[float] = field(default_factory=tuple)
    reach: Reach | None = None

    @classmethod
    def compare(
        cls, times: Mapping[str, Sequence[float]], name: str, over: str, reach: Reach | None = None
    ) -> "Row":
        """Return the row of contender `name`, with its ratio to contender `over` in each round."""
        ratios = [_ratio(*pair) for pair in zip(times[name], times[over], strict=True)]
        return cls(name, times[name], over, ratios, reach)

    def cells(self) -> list[str]:
        """Return the texts of this row."""
        decisive = self.ratios or self.values
        return [
            self.name,
            _number(median(self.values)),
            self.over,
            f"{median(self.ratios):.3f}" if self.ratios else "",
            f"{_noise(decisive):.2g}" if self.ratios or self.reach else "",
            str(self.reach or ""),
            self.reach.verdict(median(decisive), _noise(decisive)) if self.reach else "",
        ]


def parser(doc: str | None, rounds: int, rounds_help: str) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes, and its docstring as description."""
    as_written = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=doc, formatter_class=as_written)
    made.add_argument(
        "--rounds", type=positive, default=rounds, help=f"{rounds_help} (default: {rounds})"
    )
    made.add_argument(
        "--save",
        nargs="?",
        type=Path,
        const=RESULTS,
        metavar="DIRECTORY",
        help="also write the numbers of all rounds, as JSON (default: to results/ here)",
    )
    return made


def positive(text: str) -> int:
    """Return the number on the command line, which must be 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, but is {number}")
    return number


def alternate(contenders: Mapping[str, Callable[[], _T]], rounds: int) -> dict[str, list[_T]]:
    """Let every contender measure once a round; return what each measured.

    The order differs from round to round, so that nobody always follows the same one, and is the
    same on every rank.
    """
    measured: dict[str, list[_T]] = {name: [] for name in contenders}
    names = list(contenders)
    for index in range(rounds):
        first = index // 2 % len(names)
        order = names[first:] + names[:first]
        for name in order if index % 2 == 0 else reversed(order):
            measured[name].append(contenders[name]())
    return measured


def usable_cores() -> int:
    """Return the cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS has not
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def print_environment() -> dict[str, str]:
    """Print, and return, what the numbers depend on except the code."""
    about = {
        "cores": str(usable_cores()),
        "CPU": _cpu_model(),
        "torch": version("torch"),
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "load before": f"{os.getloadavg()[0]:.1f}",
        "date": datetime.now().astimezone().date().isoformat(),
    }
    print("; ".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    return about


def print_table(title: str, unit: str, rows: Iterable[Row]) -> None:
    """Print the rows as a Markdown table below a title."""
    header = ["", unit, "over", "ratio", "+-", "to reach", ""]
    lines = [header, *(row.cells() for row in rows)]
    columns = list(
        zip("<><>>><", (max(map(len, cells)) for cells in zip(*lines, strict=True)), strict=True)
    )
    rule = ["-" * (width + 1) + (":" if align == ">" else "-") for align, width in columns]
    texts = [
        [f" {cell:{align}{width}} " for cell, (align, width) in zip(line, columns, strict=True)]
        for line in lines
    ]
    print(f"\n{title}\n")
    for cells in [texts[0], rule, *texts[1:]]:
        print(f"|{'|'.join(cells)}|")
    print(flush=True)


class Report:
    """What a benchmark prints, and, with --save, keeps under the name of its script."""

    def __init__(self, script: str, directory: Path | None) -> None:
        self._script, self._directory = script, directory
        self.about, self.tables = print_environment(), dict[str, Sequence[Any]]()

    def add(self, title: str, unit: str, rows: Iterable[Row]) -> None:
        """Print the rows as a Markdown table below a title."""
        self.tables[title] = made = list(rows)
        print_table(title, unit, made)

    def save(self) -> None:
        """Write the numbers of all rounds, if that was asked for."""
        if self._directory is None:
            return
        tables = {title: [asdict(row) for row in rows] for title, rows in self.tables.items()}
        content = {"environment": self.about, "tables": tables}
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{Path(self._script).stem}.json"
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(f"written to {path}")


def require(*, holds: bool, what: str) -> None:
    """Stop where the contenders did not do the same work: their times would mean nothing."""
    if not holds:
        raise RuntimeError(f"the contenders must do the same work, but {what}")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _ratio(ours: float, theirs: float) -> float:
    if theirs == 0:  # a count, not a time: both may be none
        return 1.0 if ours == 0 else math.inf
    return ours / theirs


def _noise(values: Sequence[float]) -> float:
    """Return how far the median may be off: its 95 % interval is about this wide on either side.

    From the quartiles, as in a notched box plot: McGill, Tukey and Larsen, "Variations of Box
    Plots", The American Statistician 32, 1978.
    """
    if len(values) < 2:
        return math.inf
    low, _, high = quantiles(values, n=4, method="inclusive")
    return 1.57 * (high - low) / math.sqrt(len(values))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
