"""Scripts on ranks, started by torchrun or by its variables, for the tests of process groups."""

import json
import os
import subprocess
from contextlib import ExitStack
from typing import NamedTuple

from forked import python
from launched import agent, reserved_port, torchrun_variables


class Ended(NamedTuple):
    """How one rank ended: its exit code, what it printed, and what it left for torchrun."""

    code: int
    text: str
    cause: str


def run_all(programs, folder, runs, size=3):
    """Run scripts on ranks, all at once; return for each name how its ranks ended.

    Each run is its code, the variables of its launcher, and its arguments. In a run's folder there
    is a file for each rank that has ended.
    """
    with ExitStack() as stack:
        ranks, found = [], {name: [] for name in runs}
        for name, (code, variables, *arguments) in runs.items():
            meeting = agent() if variables is torchrun_variables else reserved_port()
            port = stack.enter_context(meeting)
            (where := folder / name).mkdir()
            for rank in range(size):
                env = variables(rank, size, port, TORCHELASTIC_ERROR_FILE=f"{rank}.json")
                to = {"folder": where, "output": where / f"{rank}.txt"}
                ranks.append((name, rank, programs.start(code, *arguments, **to, **env)))
        for name, rank, program in ranks:
            # Far below the groups' timeout, far above what a slow machine takes.
            code = program.wait(90)
            (folder / name / f"{rank} has ended").touch()
            text, file = (folder / name / f"{rank}.{kind}" for kind in ("txt", "json"))
            cause = json.loads(file.read_text())["message"]["message"] if file.exists() else ""
            found[name].append(Ended(code, text.read_text(), cause))
    return found


def torchrun(script, size, folder, *arguments, options=(), **env):
    """Run a script under torchrun and return what it did; its sockets lie in `folder`."""
    command = [str(python()), "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*command, f"--nproc-per-node={size}", *options, str(script), *arguments],
        env={**os.environ, "TMPDIR": str(folder), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
