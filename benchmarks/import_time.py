"""What `import pardata` adds to `import torch`.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --rounds 5 --breakdown

In each round two fresh processes: torch and then the classes that a hand-written script imports
(DistributedDataParallel, DataLoader, DistributedSampler); torch and then pardata. What is held
against the target is the time that `import pardata` itself takes in a process that has
torch, which varies far less than the difference of two processes. The package is compiled first,
as pip does when it installs. Also checks what pardata does not load.
"""

import argparse
import compileall
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from _measure import Report, Row, alternate, parser, require

BY_HAND = "torch, then DDP, DataLoader, DistributedSampler"
PARDATA = "torch, then pardata"

STATEMENTS = {
    BY_HAND: (
        "from torch.nn.parallel import DistributedDataParallel\n"
        "from torch.utils.data import DataLoader, DistributedSampler"
    ),
    PARDATA: "import pardata",
}

# What takes long to load, and is needed by few or later: see the modules that ask for them.
HEAVY = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "torchvision",
    "tqdm",
)

CHILD = """
import json, sys, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
before = set(sys.modules)
begin = time.perf_counter()
{statement}
end = time.perf_counter()
added = sorted(set(sys.modules) - before)
print(json.dumps([(middle - start) * 1e3, (end - begin) * 1e3, added]))
"""


def install(directory: str) -> None:
    """Copy the package and compile it, whatever the environment says about bytecode."""
    spec = find_spec("pardata")
    require(holds=spec is not None and bool(spec.origin), what="pardata is not installed")
    package = Path(str(spec and spec.origin)).parent
    target = shutil.copytree(
        package, Path(directory, "pardata"), ignore=shutil.ignore_patterns("__pycache__")
    )
    compileall.compile_dir(target, quiet=1)


def fresh(statement: str, site: str, *options: str) -> tuple[str, str]:
    """Run `statement` after torch in a process of its own; return what it printed."""
    command = [sys.executable, *options, "-c", CHILD.format(statement=statement)]
    env = {**os.environ, "PYTHONPATH": site}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    return done.stdout, done.stderr


def measure(statement: str, site: str, torch_times: list[float], added: set[str]) -> float:
    """Return the milliseconds of `statement`; note those of torch, and the modules it loaded."""
    torch_time, own_time, modules = json.loads(fresh(statement, site)[0])
    torch_times.append(torch_time)
    added.update(modules)
    return float(own_time)


def breakdown(site: str, modules: int) -> None:
    """Print the modules that `import pardata` spends longest on, as -X importtime sees them."""
    report = fresh("import pardata", site, "-Ximporttime")[1]
    lines = re.findall(r"import time: +(\d+) \| +(\d+) \| +(\S+)", report)
    # A line comes when its import has ended: those of pardata are the ones after torch's own.
    start = [name for *_, name in lines].index("torch") + 1
    ours = [(int(own), int(total), name) for own, total, name in lines[start:]]
    print(f"\n| own us | with its imports, us | of {len(ours)} modules after torch |")
    print("| -----: | -------------------: | --- |")
    package = [line for line in ours if line[2] == "pardata"]  # all of it, whatever its own part is
    for own, total, name in sorted({*sorted(ours, reverse=True)[:modules], *package}, reverse=True):
        print(f"| {own:,} | {total:,} | {name} |")
    print(f"| {sum(own for own, *_ in ours):,} | | all, slower than without -X importtime |")


def main() -> None:
    """Measure in alternated fresh processes, and print the table."""
    arguments = parser(__doc__, 15, "fresh processes of each kind")
    arguments.add_argument(
        "--breakdown", action="store_true", help="also say where the time goes, module by module"
    )
    args = arguments.parse_args()
    report = Report(__file__, args.save)
    with tempfile.TemporaryDirectory() as site:
        install(site)
        run(args, report, site)


def run(args: argparse.Namespace, report: Report, site: str) -> None:
    """Measure the package that lies in `site`."""
    torch_times: list[float] = []
    added: dict[str, set[str]] = {name: set() for name in STATEMENTS}
    calls = {
        name: partial(measure, statement, site, torch_times, added[name])
        for name, statement in STATEMENTS.items()
    }
    alternate(calls, rounds=1)  # the files in memory
    torch_times.clear()
    times = alternate(calls, args.rounds)
    for name in HEAVY:
        require(holds=name not in added[PARDATA], what=f"pardata loads {name}")
    table = [
        Row("torch", torch_times),
        Row(BY_HAND, times[BY_HAND]),
        Row(PARDATA, times[PARDATA], target="import, ms"),
    ]
    title = f"Import: {args.rounds} fresh processes of each kind, and what comes after torch"
    report.add(title, "ms", table)
    loaded = added[PARDATA]
    own = [name for name in loaded if name.partition(".")[0] == "pardata"]
    print(
        f"modules loaded after torch: {len(own)} of pardata, {len(loaded) - len(own)} others; "
        f"none of {', '.join(HEAVY)}",
        flush=True,
    )
    if args.breakdown:
        breakdown(site, 25)
    report.save()


if __name__ == "__main__":
    main()
