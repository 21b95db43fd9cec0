"""What the benchmarks share: alternated rounds, ratios, a table, and the machine they ran on.

A machine changes its speed from minute to minute. So the contenders take turns within each round,
and what counts is the median, over the rounds, of the ratio within a round. The column "±" says
how far chance may have moved that.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

from _targets import TARGETS

_T = TypeVar("_T")

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One line of a table: a quantity, and its ratio to that of another contender.

    Attributes:
        name: of the contender.
        values: one of each round.
        over: the contender to which the ratios are.
        ratios: one of each round; none where nothing is compared.
        target: the key in `TARGETS` of the target of the ratio, or of the value if there is none.
    """

    name: str
    values: Sequence[float]
    over: str = ""
    ratios: Sequence[float] = field(default_factory=tuple)
    target: str = ""

    @classmethod
    def compare(
        cls, times: Mapping[str, Sequence[float]], name: str, over: str, target: str = ""
    ) -> "Row":
        """Return the row of contender `name`, with its ratio to contender `over` in each round."""
        ratios = [_ratio(*pair) for pair in zip(times[name], times[over], strict=True)]
        return cls(name, times[name], over, ratios, target)

    def cells(self) -> list[str]:
        """Return the texts of this row."""
        decisive, target = self.ratios or self.values, TARGETS.get(self.target)
        return [
            self.name,
            _number(median(self.values)),
            self.over,
            f"{median(self.ratios):.3f}" if self.ratios else "",
            f"{noise(decisive):.2g}" if self.ratios or self.target else "",
            str(target or ""),
            target.verdict(median(decisive), noise(decisive)) if target else "",
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
        "commit": _commit(),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_options()]),
    }
    print("; ".join(f"{name}: {value}" for name, value in about.items()), flush=True)
    return about


def table(title: str, unit: str, rows: Iterable[Row]) -> str:
    """Return the rows as a Markdown table below a title."""
    header = ["", unit, "over", "ratio", "±", "target", ""]
    lines = [header, *(row.cells() for row in rows)]
    columns = list(
        zip("<><>>><", (max(map(len, cells)) for cells in zip(*lines, strict=True)), strict=True)
    )
    rule = ["-" * (width + 1) + (":" if align == ">" else "-") for align, width in columns]
    texts = [
        [f" {cell:{align}{width}} " for cell, (align, width) in zip(line, columns, strict=True)]
        for line in lines
    ]
    return "\n".join(
        [title, "", *(f"|{'|'.join(cells)}|" for cells in [texts[0], rule, *texts[1:]])]
    )


class Report:
    """What a benchmark prints, and, with --save, keeps under the name of its script."""

    def __init__(self, script: str, directory: Path | None) -> None:
        self._script, self._directory = script, directory
        self.about, self.tables = print_environment(), dict[str, Sequence[Any]]()
        self.units = dict[str, str]()

    def add(self, title: str, unit: str, rows: Iterable[Row]) -> None:
        """Print the rows as a Markdown table below a title."""
        self.tables[title] = made = list(rows)
        self.units[title] = unit
        print(f"\n{table(title, unit, made)}\n", flush=True)

    def save(self) -> None:
        """Write the numbers of all rounds, if that was asked for."""
        if self._directory is None:
            return
        tables = {title: [*map(_saved, rows)] for title, rows in self.tables.items()}
        content = {"environment": self.about, "units": self.units, "tables": tables}
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


def _saved(row: Any) -> dict[str, Any]:
    """Return a row for JSON, with the numbers of its rounds to six digits."""
    found = asdict(row)
    for name in {"values", "ratios"} & found.keys():
        found[name] = [float(f"{value:.6g}") for value in found[name]]
    return found


def _commit() -> str:
    """Return the commit of this checkout, with a "+" if it has changes; "" outside of one."""
    described = ["git", "describe", "--always", "--abbrev=8", "--dirty=+", "--exclude=*"]
    here = Path(__file__).parent
    try:
        done = subprocess.run(described, cwd=here, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git
        return ""
    return done.stdout.strip()


def _options() -> list[str]:
    """Return the arguments of the command line without --save and directories of this machine."""
    kept, skips = list[str](), False
    for word in sys.argv[1:]:
        is_place = word.endswith("-dir") or word == "--save"
        skips = is_place or (skips and not word.startswith("-"))
        if not skips:
            kept.append(word)
    return kept


def _ratio(ours: float, theirs: float) -> float:
    if theirs == 0:  # a count, not a time: both may be none
        return 1.0 if ours == 0 else math.inf
    return ours / theirs


def noise(values: Sequence[float]) -> float:
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
