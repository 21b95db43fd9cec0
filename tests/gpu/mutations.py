"""Proves that the tests of GPUs can fail: takes out each wait of the source, one at a time.

So it does with each event, each memory that is kept for its reader, each pin, each copy of a
snapshot, and each choice of a device or of a way of numbers. Each must turn a test red on the
simulated accelerator. The checkout is never edited: each mutation gets a copy of it.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mutation_table import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "pardata"

# Each line of the source that has one of these must be in the table, but for …
MARKS = re.compile(
    r"\.(wait_stream|wait_event|record_stream|record_event|set_device_index|pin_memory)\("
    r"|\.(synchronize|wait)\(\)|pin_memory=True|non_blocking="
)
# … threads, files, and what is itself made of these.
OTHERS = {"begin.wait()", "self._ended.wait()", "written.wait()", "self.wait()", "Event().wait()"}


def places(source, mutation):
    """Return where the old text of a mutation is in the source."""
    return [found.span() for found in re.finditer(re.escape(mutation.old), source)]


def mutated(source, mutation):
    """Return the source with the mutation."""
    if len(places(source, mutation)) != 1:
        raise LookupError(
            f"{mutation.file} must have {mutation.old!r} once, but has it "
            f"{len(places(source, mutation))} times: change the table as the source was changed"
        )
    return source.replace(mutation.old, mutation.new)


def unnamed():
    """Return each line of the source that has one of the marks and is in no mutation."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        text, file = path.read_text(), path.relative_to(SOURCE).as_posix()
        own = [m for m in MUTATIONS.values() if m.file == file]
        spans = [span for mutation in own for span in places(text, mutation)]
        for mark in MARKS.finditer(text):
            start = text.rfind("\n", 0, mark.start()) + 1
            line = text[start : text.find("\n", start)].strip()
            is_named = any(first < mark.end() and mark.start() < last for first, last in spans)
            if not is_named and not any(other in line for other in OTHERS):
                found.append(f"{file}: {line}")
    return found


class Outcome(NamedTuple):
    """What came of a mutation: the tests that went red, or why none did."""

    red: list[str]
    told: str
    seconds: float


def tried(mutation):
    """Run the tests of a mutation on a copy of the checkout."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        for name in ("src", "tests"):
            left_out = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, Path(directory) / name, ignore=left_out)
        for name in ("pyproject.toml", "CONTRIBUTING.md", "README.md"):
            shutil.copy(ROOT / name, directory)
        path = Path(directory) / "src/pardata" / mutation.file
        path.write_text(mutated(path.read_text(), mutation))
        done = _tested(directory, shlex.split(mutation.tests))
    red = re.findall(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - |$)", done.stdout, re.MULTILINE)
    told = "" if done.returncode == 1 and red else (done.stdout + done.stderr)[-2000:]
    return Outcome(red, told, time.monotonic() - begin)


def _tested(directory, tests):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=1"]
    if tests[0].startswith("tests/gpu"):
        command += ["-m", "gpu", "--device=sim"]
    env = {**os.environ, "PYTHONPATH": f"{directory}/src", "COLUMNS": "300"}
    for name in [name for name in env if name.startswith("PYTEST_")]:
        del env[name]  # those of the tests that try this
    return subprocess.run(
        [*command, *tests], cwd=directory, env=env, capture_output=True, text=True, check=False
    )


def table_of(chosen, jobs):
    """Try mutations, print what came of each, and return whether all turn a test red."""
    missed, seen_by = [], set()
    with ThreadPoolExecutor(jobs) as pool:
        for name, outcome in zip(chosen, pool.map(tried, chosen.values()), strict=True):
            verdict = "survived" if outcome.told else "caught"
            print(f"{verdict:8}  {outcome.seconds:4.0f} s  {name}")
            print(f"{'':18}{', '.join(outcome.red)}", flush=True)
            if outcome.told:
                missed.append(name)
                print(outcome.told, flush=True)
            else:
                seen_by.update(outcome.red)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations turn a test red")
    return not missed and _are_green(seen_by)


def _are_green(tests):
    """Return whether these tests pass on the source as it is; say which do not."""
    on_gpus = sorted(test for test in tests if test.startswith("tests/gpu"))
    for part in filter(None, (on_gpus, sorted(tests.difference(on_gpus)))):
        done = _tested(ROOT, part)
        if done.returncode:
            print(f"these tests are red without a mutation too:\n{done.stdout[-2000:]}")
            return False
    print(f"on the source as it is the {len(tests)} tests that saw them are green")
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("part", nargs="?", default="", help="only those with this in their name")
    parser.add_argument("--quick", action="store_true", help="only those that CI tries")
    parser.add_argument("--list", action="store_true", help="print them and try none")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    given = parser.parse_args()
    chosen = {
        name: mutation
        for name, mutation in MUTATIONS.items()
        if given.part in name and (mutation.is_quick or not given.quick)
    }
    if given.list:
        print("\n".join(f"{name}\n    {m.file}: {m.old.strip()}" for name, m in chosen.items()))
        return 0
    return int(not table_of(chosen, given.jobs))


if __name__ == "__main__":
    sys.exit(main())
