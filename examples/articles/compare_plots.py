"""The pictures of a comparison: where the time goes, what loader workers and processes change."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # to files only: clusters have no display
from compare_cells import counted
from compare_tables import Row, efficiency, families
from matplotlib import pyplot as plt  # after the choice of the backend
from matplotlib.axes import Axes  # likewise
from matplotlib.figure import Figure  # likewise

LOAD, UPDATE = "tab:orange", "tab:blue"
MARKERS = "osD^vP"  # lines that lie on each other are told apart by these


def draw(rows: Sequence[Row], directory: Path) -> list[Path]:
    """Draw what these rows show into PNG files in `directory`, and return their paths."""
    done = [row for row in rows if row.results]
    drawn = []
    for name, figure in {
        "methods": methods(done),
        "workers": workers(done),
        "processes": processes(done),
    }.items():
        if figure is not None:
            drawn.append(directory / f"{name}.png")
            figure.savefig(drawn[-1], dpi=120)
            plt.close(figure)
    return drawn


def methods(rows: Sequence[Row]) -> Figure | None:
    """Return a bar for each row: seconds of waiting and computing, and the accuracy."""
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.45 * len(rows)), layout="constrained")
    names = [row.cell.title for row in rows]
    updates = [row.seconds * row.update / (row.load + row.update) for row in rows]
    loads = [row.seconds - update for row, update in zip(rows, updates, strict=True)]
    axes.barh(names, loads, 0.6, color=LOAD, label="waiting for data")
    axes.barh(names, updates, 0.6, left=loads, color=UPDATE, label="computing")
    for place, row in enumerate(rows):
        text = f" {row.seconds:.1f} s, {row.accuracy:.1f} %"
        axes.text(row.seconds, place, text, va="center")
    axes.invert_yaxis()  # the first on top
    axes.set(xlabel="seconds of training", title="Time, and accuracy on the test set")
    axes.set_xlim(0, 1.25 * max(row.seconds for row in rows))  # room for the text
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def workers(rows: Sequence[Row]) -> Figure | None:
    """Return load and update time against the number of workers, where that was varied."""
    by_method: dict[str, list[Row]] = {}
    for row in rows:
        by_method.setdefault(row.cell.method, []).append(row)
    varied = {
        method: sorted(group, key=lambda row: row.cell.workers)
        for method, group in by_method.items()
        if len({row.cell.workers for row in group}) > 1
    }
    if not varied:
        return None
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    for index, (method, group) in enumerate(varied.items()):
        numbers = [row.cell.workers for row in group]
        style = _style(index)
        panels[0].plot(numbers, [1000 * row.load for row in group], label=method, **style)
        panels[1].plot(numbers, [1000 * row.update for row in group], **style)
    panels[0].set(title="Load: waiting for data", ylabel="milliseconds a step")
    panels[1].set(title="Update: computing")
    ticks = sorted({row.cell.workers for group in varied.values() for row in group})
    for axes in panels:
        _grid(axes, "loader workers of each process", ticks)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def processes(rows: Sequence[Row]) -> Figure | None:
    """Return speed-up and efficiency against the number of processes, where that was varied."""
    found = families(rows)
    if not found:
        return None
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    ticks = sorted({row.cell.processes for family in found for row in family})
    panels[0].plot(ticks, [n / ticks[0] for n in ticks], "k:", label="ideal")
    panels[1].plot(ticks, [100 for _ in ticks], "k:")
    for index, (base, *others) in enumerate(found):
        cell = others[-1].cell
        words = [cell.strategy] + ["cached"] * cell.cache + ["augmented"] * cell.augment
        label = ", ".join([*words, counted(cell.workers, "worker")])
        from_base = base.cell.processes < others[0].cell.processes
        line = [base, *others] if from_base else others
        numbers = [row.cell.processes for row in line]
        style = _style(index)
        speeds = [row.speed_up_over(base) for row in line]
        panels[0].plot(numbers, speeds, label=label, **style)
        panels[1].plot(numbers, [efficiency(row, base) for row in line], **style)
    over = "one process, not wrapped" if found[0][0].cell.strategy == "none" else "the fewest"
    panels[0].set(title="Speed-up", ylabel=f"times as fast as {over}")
    panels[1].set(title="Efficiency", ylabel="% of the ideal")
    for axes in panels:
        _grid(axes, "processes", ticks)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _style(index: int) -> dict[str, str]:
    return {"color": f"C{index}", "marker": MARKERS[index % len(MARKERS)]}


def _grid(axes: Axes, label: str, ticks: list[int]) -> None:
    axes.set(xlabel=label, xticks=ticks)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])  # from 0, with room for the highest marker
    axes.grid(alpha=0.3)
