"""Show what pardata finds on this machine, and whether processes can train together on it.

  env    what is there: the launcher and its variables, GPUs, cores, shared memory, limits, versions
  check  a trial run: join, all-reduce, measure latency and bandwidth

Alone, `check` starts two processes. Under a launcher (torchrun, srun, mpirun) every process runs
the command, and rank 0 prints.

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
import json
import os
import sys

from pardata.doctor._checks import Finding, check, environment
from pardata.environment._launchers import detect_launch


def main(arguments: list[str]) -> int:
    """Run the command, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m pardata",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=("env", "check"), help="what to do")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    how_long = "how long to wait for other ranks (default: 60)"
    parser.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help=how_long)
    chosen = parser.parse_args(arguments)
    # Waits for other ranks have a timeout, the one for torch's store twice that. Any other hang
    # ends here, with its stack.
    faulthandler.dump_traceback_later(2 * chosen.timeout + 15, exit=True)
    return report(chosen.command, chosen.timeout, as_json=chosen.json)


def report(command: str, timeout: float, *, as_json: bool = False) -> int:
    """Print the findings of "env" or "check" on rank 0, errors on each rank; return the status."""
    prints, fails = True, False
    try:
        launch = detect_launch(os.environ)
        prints = launch.rank == 0
        findings = check(launch, timeout) if command == "check" else environment(launch, os.environ)
    except Exception as error:  # noqa: BLE001  # an error of any type is a finding
        text = str(error).partition("\n\n")[0]  # then come stacks
        findings, fails = [Finding(command, text or type(error).__name__)], True
    if prints or fails:
        found, lines = dict[str, dict[str, str]](), list[str]()
        for name, text, cure in findings:
            status = "error" if fails else "warning" if cure else "ok"
            found[name] = {"status": status, "text": text, "cure": cure}
            lines.append(f"{status:9}{name:15}{text}" + f"\n{'':24}cure: {cure}" * bool(cure))
        print(json.dumps(found, indent=2) if as_json else "\n".join(lines), flush=True)
    return int(fails)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
