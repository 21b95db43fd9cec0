"""`python -m pardata`: reads the command line, and hands over to the doctor."""

import argparse
import math
import sys

from pardata.doctor._examination import examine

_DESCRIPTION = """\
Show what pardata finds on this machine, and whether processes can train together on it.

  env    what is there: the launcher and the variables that tell of it, GPUs, cores, threads,
         shared memory, limits, versions
  check  a trial run: join, reduce, broadcast, measure latency and bandwidth, hand a batch over

Alone, `env` looks at this process and `check` starts two. Under a launcher (torchrun, srun,
mpirun) every process runs the command; they join, and rank 0 prints one table of all ranks.
"""
_EXAMPLES = """\
examples:
  python -m pardata env
  python -m pardata check
  torchrun --standalone --nproc-per-node=2 -m pardata check
  srun -N 2 --ntasks-per-node=4 python -m pardata check --timeout 120
  python -m pardata env --json

exit status: 0 where all is well, warnings included; 1 where something will not work; 2 for a
command line that is wrong.
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m pardata",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=("env", "check"), help="what to do")
    parser.add_argument("--json", action="store_true", help="print for machines, as JSON")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for other ranks (default: 60)",
    )
    return parser.parse_args(arguments)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86400:
        msg = f"must be a number of seconds above 0, up to a day, but is {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return seconds


if __name__ == "__main__":
    chosen = parse(sys.argv[1:])
    sys.exit(examine(chosen.command, timeout=chosen.timeout, as_json=chosen.json))
