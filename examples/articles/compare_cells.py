"""One cell of a comparison: how an example is started, and what its run leaves in its folder."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compare_machine import load

ONE_PROCESS = ("none", "dp")  # strategies that never run in several

# What torchrun says itself begins so, after what the ranks said.
TORCHRUN = re.compile(r"[WE]\d{4} [\d:.]+ \d+ torch/distributed/elastic")


@dataclass(frozen=True)
class Cell:
    """One run of an example.

    Attributes:
        script: the example.
        options: those that all cells have, the number of epochs apart.
        epochs: times through the training set.
        strategy: how replicas are kept equal.
        processes: how many.
        workers: loader workers of each process.
        cache: whether the images are decoded once, and transformed by whole batches.
        augment: whether --augment is given.
        round: which repetition this is.
    """

    script: str
    options: tuple[str, ...]
    epochs: int
    strategy: str
    processes: int
    workers: int
    cache: bool = False
    augment: bool = False
    round: int = 0

    @property
    def method(self) -> str:
        """What is compared, the number of loader workers apart."""
        many = "" if self.strategy in ONE_PROCESS else f", {counted(self.processes, 'process')}"
        cached, augmented = ", cached" * self.cache, ", augmented" * self.augment
        return f"{self.strategy}{many}{cached}{augmented}"

    @property
    def title(self) -> str:
        """What is compared."""
        return f"{self.method}, {counted(self.workers, 'worker')}"

    def command(self) -> list[str]:
        """Return what is run, the folder of its results apart."""
        launcher = []
        if self.strategy not in ONE_PROCESS:
            launcher = ["-m", "torch.distributed.run", "--standalone"]
            launcher += [f"--nproc-per-node={self.processes}"]
        switches = ["--cache"] * self.cache + ["--augment"] * self.augment
        return [
            *(sys.executable, *launcher, str(Path(__file__).with_name(f"{self.script}.py"))),
            *("--strategy", self.strategy, "--num-workers", str(self.workers)),
            *("--epochs", str(self.epochs), *switches, *self.options),
        ]

    def folder(self, out: Path, machine: str) -> Path:
        """Return where in `out` its results are: another place for other options or machines."""
        about = json.dumps([self.command()[1:], self.script, machine])
        words = [self.strategy, f"{self.processes}p", f"{self.workers}w"]
        words += ["cached"] * self.cache + ["augmented"] * self.augment
        words += [f"r{self.round + 1}", hashlib.sha256(about.encode()).hexdigest()[:8]]
        return out / "cells" / "-".join(words)

    def once(self) -> "Cell":
        """Return the same cell, whichever repetition it is."""
        return replace(self, round=0)


@dataclass(frozen=True)
class Result:
    """What a finished run measured.

    Attributes:
        accuracy: on the test set, at the end, in percent.
        seconds: of training, without the start and the tests.
        waited: those of them in which rank 0 waited for data.
        steps: optimizer steps.
        wall: seconds from the start of the process to its end.
        load: the machine's load average before it.
        date: on which it was measured.
    """

    accuracy: float
    seconds: float
    waited: float
    steps: int
    wall: float
    load: float
    date: str


class CellError(Exception):
    """A run that failed, with the last line of its error."""


def counted(number: int, thing: str) -> str:
    """Return a number with its noun, as in "2 processes"."""
    plural = "es" if thing.endswith("s") else "s"
    return f"{number} {thing}{'' if number == 1 else plural}"


def kept(folder: Path) -> Result | None:
    """Return what a run left that has finished; None where there is no such run."""
    try:
        return Result(**json.loads((folder / "result.json").read_text()))
    except (OSError, ValueError, TypeError):  # none, or not a whole one
        return None


def run(
    cell: Cell, folder: Path, *, cores: int, timeout: float, show: Callable[[str], None]
) -> Result:
    """Run a cell in fresh processes, from nothing; keep its result in `folder` and return it.

    Args:
        cell: what to run.
        folder: emptied first: an example would go on from an older run's checkpoint.
        cores: of this machine, shared fairly by the processes of the cell.
        timeout: in seconds; a cell that takes longer has failed.
        show: called about once a second with how far the cell is.

    Raises:
        CellError: where it fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    begin, before = time.perf_counter(), load()
    status = _run_to_the_end(cell, folder, cores, timeout, show)
    wall = time.perf_counter() - begin
    if status:
        raise CellError(_last_error(folder, status))
    measured = measured_in(folder, cell.epochs)
    result = Result(**measured, wall=wall, load=before, date=time.strftime("%Y-%m-%d"))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # large, and nobody resumes here
    (folder / "weights.pt").unlink(missing_ok=True)
    unfinished = folder / "result.json.new"
    unfinished.write_text(json.dumps(asdict(result), indent=1) + "\n")
    unfinished.replace(folder / "result.json")
    return result


def measured_in(folder: Path, epochs: int) -> dict[str, Any]:
    """Return accuracy, seconds, waited and steps from the metrics that an example has written.

    Raises:
        CellError: where the run did not come to its end.
    """
    tests = [row for row in _rows(folder) if "test/accuracy" in row]
    if len(tests) < epochs:
        raise CellError(f"it ended after {len(tests)} of {counted(epochs, 'epoch')}")
    return {
        "accuracy": tests[-1]["test/accuracy"],
        "seconds": sum(row["time/epoch"] for row in tests),
        "waited": sum(row["time/waiting"] for row in tests),
        "steps": tests[-1]["step"],
    }


def _run_to_the_end(
    cell: Cell, folder: Path, cores: int, timeout: float, show: Callable[[str], None]
) -> int:
    """Return the exit status; leave nothing running, whatever happens here."""
    env = {
        # torchrun would give each process one thread, and a single process has them all.
        "OMP_NUM_THREADS": str(max(1, cores // cell.processes)),
        "PARDATA_CACHE": str(folder.parents[1] / "cache"),
        **os.environ,
    }
    begin = time.perf_counter()
    with (folder / "stdout.txt").open("w") as out, (folder / "stderr.txt").open("w") as err:
        process = subprocess.Popen(  # noqa: S603  # an example of ours
            [*cell.command(), "--run-dir", str(folder)], stdout=out, stderr=err, env=env
        )
        try:
            while (spent := time.perf_counter() - begin) < timeout:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(min(1.0, timeout - spent))
                show(_progress(folder, begin))
        finally:
            _end(process)
    raise CellError(f"it was ended after {timeout:g} seconds, see --timeout")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what still runs: torchrun ends its ranks when it is told to."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _progress(folder: Path, begin: float) -> str:
    rows = _rows(folder)
    step = f"step {rows[-1]['step']}, " if rows else ""
    return f"{step}{time.perf_counter() - begin:.0f} s"


def _rows(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # a last one may be half


def _last_error(folder: Path, status: int) -> str:
    """Return the last line that a failed run said, or what killed it."""
    if status < 0:
        return f"killed by {_name_of(-status)}"
    lines = (folder / "stderr.txt").read_text(errors="replace").splitlines()
    own = next((i for i, line in enumerate(lines) if TORCHRUN.match(line)), len(lines))
    killed = re.search(r"exitcode: -(\d+)\) local_rank: (\d+)", "\n".join(lines[own:]))
    # By SIGTERM torchrun itself ends the ranks that still run when one has failed.
    if killed and int(killed[1]) != signal.SIGTERM:
        return f"rank {killed[2]} was killed by {_name_of(int(killed[1]))}"
    said = [line for line in lines[:own] if line.strip()]
    said = said or (folder / "stdout.txt").read_text(errors="replace").split("\n")
    said = [line for line in said if line.strip()] or [f"exit status {status}"]
    return re.sub(r"^\[rank\d+\]: ", "", said[-1].strip())


def _name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
