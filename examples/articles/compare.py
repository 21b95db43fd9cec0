"""Compare strategies, loader workers, numbers of processes and caching: tables and pictures.

    python compare.py  # on digits: no network, some minutes
    python compare.py --dry-run  # what would be run
    python compare.py --data mnist --strategies none ddp --processes 1 2 4 --workers 4
    python compare.py --data mnist --strategies none --workers 0 2 4 --augment no yes
    python compare.py --strategies none ddp --workers 0 --cache no yes --rounds 3
    python compare.py --script cifar10 --processes 1 2 --workers 0 -- --model resnet18

Every combination is a cell: one run of mnist.py or cifar10.py in fresh processes, strategies none
and dp with python, in one process, the others with torchrun. What stands after -- is handed to the
example. Finished cells are kept in the --out folder and not run again, so that the same command,
started again, resumes; a cell measured under other options or on another machine is another cell.
One that fails is reported with the last line of its error, is run again the next time, and makes
the exit status 1.

Standard output, and tables.md in the folder, receive Markdown tables; methods.png, workers.png and
processes.png are drawn next to it. Times are of training: without the start, the cache's making and
the tests. The processes of a cell share the cores fairly, unless OMP_NUM_THREADS says otherwise.
"""

import argparse
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import compare_plots
from compare_cells import ONE_PROCESS, Cell, CellError, Result, counted, kept, run
from compare_machine import machine, usable_cores
from compare_tables import Row, tables

DATA = {"mnist": ("digits", "mnist"), "cifar10": ("digits", "cifar10", "folder")}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--script", choices=list(DATA), default="mnist", help="which example (default: mnist)")
    add("--data", default="digits", help="its --data (default: digits, which need no network)")
    add("--data-dir", help="its --data-dir: where the images are, or are downloaded to")
    add(
        "--strategies",
        nargs="+",
        choices=["none", "dp", "ddp", "fsdp", "exact"],
        default=["none", "dp", "ddp"],
        help="(default: none dp ddp)",
    )
    add(
        "--processes",
        nargs="+",
        type=positive,
        default=[1, 2],
        metavar="N",
        help="of one cell; none and dp always run in one (default: 1 2)",
    )
    add(
        "--workers",
        nargs="+",
        type=not_negative,
        default=[0, 2],
        metavar="N",
        help="loader workers of each process (default: 0 2)",
    )
    for name, what in {
        "--cache": "decode the images once, and transform whole batches",
        "--augment": "rotate, shift and scale the digits at random; mnist only",
    }.items():
        add(name, nargs="+", choices=["no", "yes"], default=["no"], help=f"{what} (default: no)")
    add("--epochs", type=positive, default=1, help="of each cell (default: 1)")
    add("--rounds", type=positive, default=1, help="repetitions, of which medians count (1)")
    add("--out", type=Path, default=Path("runs/compare"), help="(default: runs/compare)")
    add("--timeout", type=positive, default=3600, help="seconds that a cell may take (3600)")
    add("--dry-run", action="store_true", help="list the cells and their commands, and run none")
    add("options", nargs="*", metavar="-- OPTION", help="what else the example is told")
    args = parser.parse_args(arguments)
    if args.data not in DATA[args.script]:
        known = " or ".join(DATA[args.script])
        parser.error(f"--data of --script {args.script} must be {known}, but is {args.data}")
    if args.script == "cifar10" and "yes" in args.augment:
        parser.error("--augment yes is for --script mnist: cifar10 always augments; leave it out")
    return args


def positive(text: str) -> int:
    """Return the number on the command line, which must be 1 or more."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """Return the number on the command line, which must be 0 or more."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} up, but is {text}")
    return int(text)


def cells(args: argparse.Namespace) -> list[Cell]:
    """Return what is to be run, in that order: every second round the other way round."""
    where = ["--data-dir", args.data_dir] if args.data_dir else []
    options = ("--data", args.data, *where, *args.options)
    made = [
        Cell(
            script=args.script,
            options=options,
            epochs=args.epochs,
            strategy=strategy,
            processes=processes,
            workers=workers,
            cache=cache == "yes",
            augment=augment == "yes",
        )
        for cache, augment, strategy in product(args.cache, args.augment, args.strategies)
        for processes in ([1] if strategy in ONE_PROCESS else args.processes)
        for workers in args.workers
    ]
    once = list(dict.fromkeys(made))  # what is named twice is run once
    rounds = [once if index % 2 == 0 else once[::-1] for index in range(args.rounds)]
    return [replace(cell, round=index) for index, order in enumerate(rounds) for cell in order]


def measure(planned: Sequence[Cell], args: argparse.Namespace) -> dict[Cell, Result | str]:
    """Run the cells that have not finished; return the result of each, or its error."""
    cores, found = usable_cores(), machine()
    outcomes: dict[Cell, Result | str] = {}
    for number, cell in enumerate(planned, 1):
        here = f"[{number}/{len(planned)}] {cell.title}" + f", round {cell.round + 1}" * (
            args.rounds > 1
        )
        folder = cell.folder(args.out, found)
        result = kept(folder)
        verb = "kept" if result else "measured"
        try:
            result = result or run(
                cell, folder, cores=cores, timeout=args.timeout, show=partial(_passing, here)
            )
        except CellError as error:
            outcomes[cell] = str(error)
            _lasting(f"{here}: FAILED: {error} (what it said is in {folder})")
        else:
            outcomes[cell] = result
            _lasting(
                f"{here}: {verb}: {result.seconds:.2f} s, {result.waited:.2f} s of them waiting, "
                f"{result.accuracy:.2f} %; {result.wall:.0f} s with start and tests"
            )
    return outcomes


def rows(outcomes: Mapping[Cell, Result | str]) -> list[Row]:
    """Return the outcomes with the rounds of a cell put together."""
    by_cell: dict[Cell, list[Result | str]] = {}
    for cell, outcome in sorted(outcomes.items(), key=lambda item: item[0].round):
        by_cell.setdefault(cell.once(), []).append(outcome)
    made = []
    for cell, found in by_cell.items():
        results = [outcome for outcome in found if isinstance(outcome, Result)]
        made.append(Row(cell, results if len(results) == len(found) else []))
    return made


def conditions(results: Sequence[Result]) -> str:
    """Return on what these were measured, when, and how busy it was before."""
    days = sorted({result.date for result in results})
    loads = [result.load for result in results]
    return (
        f"{machine()}; {' to '.join(dict.fromkeys([days[0], days[-1]]))}; load average before a "
        f"cell {min(loads):.1f} to {max(loads):.1f}"
    )


def _passing(title: str, progress: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{title}: {progress}", end="", file=sys.stderr, flush=True)


def _lasting(text: str) -> None:
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{clear}{text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    planned = cells(args)
    if args.dry_run:
        found = machine()
        for cell in planned:
            finished = "kept" if kept(cell.folder(args.out, found)) else "to run"
            print(
                f"{finished:6}  {cell.title}\n        {shlex.join(['python', *cell.command()[1:]])}"
            )
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    outcomes = measure(planned, args)
    results = [outcome for outcome in outcomes.values() if isinstance(outcome, Result)]
    if results:
        made = rows(outcomes)
        command = shlex.join(
            ["python", "examples/articles/compare.py", *(arguments or sys.argv[1:])]
        )
        text = f"`{command}`\n\n{conditions(results)}.\n\n{tables(made)}\n"
        print(f"\n{text}")
        (args.out / "tables.md").write_text(text)
        for path in compare_plots.draw(made, args.out):
            _lasting(f"drawn in {path}")
    failed = len(outcomes) - len(results)
    if failed:
        _lasting(f"{failed} of {counted(len(outcomes), 'cell')} FAILED, as said above")
    return 1 if failed else 0


if __name__ == "__main__":
    # As from Ctrl-C: what runs is ended, and what has finished stays.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command resumes after the cells that have finished")
