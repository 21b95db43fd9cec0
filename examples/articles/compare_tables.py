"""The tables of a comparison, in Markdown: methods, loader workers and numbers of processes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from compare_cells import Cell, Result


@dataclass(frozen=True)
class Row:
    """A cell with the results of its rounds; with none where a round has failed."""

    cell: Cell
    results: Sequence[Result]

    @property
    def seconds(self) -> float:
        """Seconds of training, the median of the rounds."""
        return median(result.seconds for result in self.results)

    @property
    def load(self) -> float:
        """Seconds a step in which rank 0 waited for data."""
        return median(result.waited / result.steps for result in self.results)

    @property
    def update(self) -> float:
        """Seconds a step in which it did not."""
        return median((result.seconds - result.waited) / result.steps for result in self.results)

    @property
    def accuracy(self) -> float:
        """Percent of the test set."""
        return median(result.accuracy for result in self.results)

    def speed_up_over(self, other: "Row") -> float:
        """Return how much faster this is: the median of the ratios within a round."""
        pairs = zip(other.results, self.results, strict=True)
        return median(slow.seconds / fast.seconds for slow, fast in pairs)


def tables(rows: Sequence[Row]) -> str:
    """Return all tables that these rows make."""
    parts = [
        "Method, accuracy, time:",
        _table("<>>>", ["method", "accuracy, %", "time, s", "time / the first"], _methods(rows)),
        "Loading and computing:",
        _table(
            "<>>>>>",
            ["method", "workers", "load, s a step", "update, s a step", "total, s", "accuracy, %"],
            _workers(rows),
        ),
    ]
    if scaling := _scaling(rows):
        header = ["method", "workers", "processes", "seconds", "speed-up", "efficiency, %"]
        parts += ["Processes, speed-up, efficiency:", _table("<>>>>>", header, scaling)]
    return "\n\n".join([*parts, _note(rows)])


def families(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the finished rows that differ only in their number of processes, the base first.

    The base is the single process without a wrapper, or where that is not among the rows the
    fewest processes of the strategy itself.
    """
    done = [row for row in rows if row.results]
    alone = {_settings(row.cell): row for row in done if row.cell.strategy == "none"}
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in done:
        if row.cell.strategy not in ("none", "dp"):
            groups.setdefault((row.cell.strategy, *_settings(row.cell)), []).append(row)
    found = []
    for (_, *settings), group in groups.items():
        ordered = sorted(group, key=lambda row: row.cell.processes)
        base = alone.get(tuple(settings))
        ordered = [base, *ordered] if base else ordered
        if ordered[-1].cell.processes > ordered[0].cell.processes:
            found.append(ordered)
    return found


def efficiency(row: Row, base: Row) -> float:
    """Return the speed-up over `base` in percent of that of the processes."""
    return 100 * row.speed_up_over(base) * base.cell.processes / row.cell.processes


def _settings(cell: Cell) -> tuple[object, ...]:
    return cell.workers, cell.cache, cell.augment


def _methods(rows: Sequence[Row]) -> list[list[str]]:
    first = next((row for row in rows if row.results), None)
    lines = []
    for row in rows:
        if not row.results or first is None:
            lines.append([row.cell.title, "failed", "", ""])
        else:
            ratio = 1 / row.speed_up_over(first)
            lines.append(
                [row.cell.title, f"{row.accuracy:.2f}", f"{row.seconds:.2f}", f"{ratio:.2f}"]
            )
    return lines


def _workers(rows: Sequence[Row]) -> list[list[str]]:
    lines = []
    # Rows of one method below each other, in the order of the first of each.
    order = list(dict.fromkeys(row.cell.method for row in rows))
    for row in sorted(rows, key=lambda row: (order.index(row.cell.method), row.cell.workers)):
        what = [row.cell.method, str(row.cell.workers)]
        if row.results:
            times = [f"{row.load:.4f}", f"{row.update:.4f}", f"{row.seconds:.2f}"]
            lines.append([*what, *times, f"{row.accuracy:.2f}"])
        else:
            lines.append([*what, "failed", "", "", ""])
    return lines


def _scaling(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [
            row.cell.method,
            str(row.cell.workers),
            str(row.cell.processes),
            f"{row.seconds:.2f}",
            f"{row.speed_up_over(family[0]):.2f}",
            f"{efficiency(row, family[0]):.0f}",
        ]
        for family in families(rows)
        for row in family
    ]


def _note(rows: Sequence[Row]) -> str:
    """Return how far the figures may be trusted."""
    rounds = max((len(row.results) for row in rows), default=0)
    if rounds < 2:
        return "Each figure is one measurement."
    apart = max(
        max(result.seconds for result in row.results) / min(r.seconds for r in row.results) - 1
        for row in rows
        if row.results
    )
    return (
        f"Each figure is the median of {rounds} rounds; within a row the longest time is at most "
        f"{100 * apart:.0f} % above the shortest."
    )


def _table(align: str, header: list[str], lines: Iterable[list[str]]) -> str:
    texts = [header, *lines]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    columns = list(zip(align, widths, strict=True))
    drawn = [
        [f" {text:{side}{width}} " for text, (side, width) in zip(line, columns, strict=True)]
        for line in texts
    ]
    rule = ["-" * (width + 1) + (":" if side == ">" else "-") for side, width in columns]
    return "\n".join(f"|{'|'.join(line)}|" for line in [drawn[0], rule, *drawn[1:]])
