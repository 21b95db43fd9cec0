"""Show what pardata finds on this machine, and whether processes can train together on it.

  env    what is there: the launcher and the variables that tell of it, GPUs, cores, threads,
         shared memory, limits, versions
  check  a trial run: join, all-reduce, measure latency and bandwidth, take a batch from a worker

Alone, `env` looks at this process and `check` starts two. Under a launcher (torchrun, srun,
mpirun) every process runs the command; they join, and rank 0 prints one report of all ranks.

Examples:
  python -m pardata env
  python -m pardata check
  torchrun --standalone --nproc-per-node=2 -m pardata check
  python -m pardata env --json
  srun -N 2 --ntasks-per-node=4 python -m pardata check --timeout 120

Exit status: 0 where all is well, warnings included; 1 where something will not work; 2 for a
command line that is wrong.
"""

import argparse
import faulthandler
import sys

from pardata.doctor._examination import examine


def main(arguments: list[str]) -> int:
    """Do what the command line says, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pardata",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=("env", "check"), help="what to do")
    parser.add_argument("--json", action="store_true", help="print one JSON document, for programs")
    how_long = "how long to wait for other ranks (default: 60)"
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help=how_long)
    chosen = parser.parse_args(arguments)
    if not 0 < chosen.timeout <= 86400:
        wrong = f"a number of seconds above 0, up to a day, but is {chosen.timeout:g}"
        parser.error(f"argument --timeout: must be {wrong}")
    # What waits for other ranks ends by itself and says why, the wait for the store of torch only
    # after twice its timeout. Whatever else hangs ends here, and shows where it was.
    faulthandler.dump_traceback_later(2 * chosen.timeout + 15, exit=True)
    return examine(chosen.command, timeout=chosen.timeout, as_json=chosen.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
