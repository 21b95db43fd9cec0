"""`python -m pardata`: reads the command line, and hands over to the doctor."""

import argparse
import faulthandler
import math
import sys

from pardata.doctor._examination import examine

_DESCRIPTION = """\
Show what pardata finds on this machine, and whether processes can train together on it.

  env    what is there: the launcher and the variables that tell of it, GPUs, cores, threads,
         shared memory, limits, versions
  check  a trial run: join, all-reduce, measure latency and bandwidth, take a batch from a worker

Alone, `env` looks at this process and `check` starts two. Under a launcher (torchrun, srun,
mpirun) every process runs the command; they join, and rank 0 prints one table of all ranks.
"""
_EXAMPLES = """\
examples:
  python -m pardata env
  python -m pardata check
  torchrun --standalone --nproc-per-node=2 -m pardata check
  srun -N 2 --ntasks-per-node=4 python -m pardata check --timeout 120

exit status: 0 where all is well, warnings included; 1 where something will not work; 2 for a
command line that is wrong.
"""


def main(arguments: list[str]) -> int:
    """Do what the command line says, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pardata",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=("env", "check"), help="what to do")
    how_long = "how long to wait for other ranks (default: 60)"
    parser.add_argument("--timeout", type=_seconds, default=60, metavar="SECONDS", help=how_long)
    chosen = parser.parse_args(arguments)
    # What waits for other ranks ends by itself and says why, the wait for the store of torch only
    # after twice its timeout. Whatever else hangs ends here, and shows where it was.
    faulthandler.dump_traceback_later(2 * chosen.timeout + 15, exit=True)
    return examine(chosen.command, timeout=chosen.timeout)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86400:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds above 0, up to a day, but is {text!r}"
        )
    return seconds


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
