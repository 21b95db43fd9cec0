"""Processes that were started wrongly: the rows of ``errors.md`` on `init` and `world`.

Real processes with a launcher's variables and no group. Each goes through all rows, so none of
them may join.
"""

import functools
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from forked import python
from launched import reserved_port, slurm_variables
from misuse import ROWS, SCOPE
from on_ranks import Raised, caught
from pretended import accelerators

from pardata import init
from pardata.environment._launchers import MPICH, OPEN_MPI, SLURM, TORCHRUN

STARTS = [row for row in ROWS if row.name in {"init", "world"}]

# "{rank}", "{size}" and "{port}" are filled in on each rank; `None` takes a variable away.
OF_RANK = ("{rank}", "{size}", "{rank}", "{size}", "127.0.0.1", "{port}")
LAUNCHED = dict(zip(TORCHRUN, OF_RANK, strict=True))
SRUN = slurm_variables("{rank}", 2, None, SLURM_JOB_ID="7", MASTER_PORT=None)
MPIRUN = dict(zip(OPEN_MPI, ("{rank}", "2", "0", "1"), strict=True))

PORT_IS_TAKEN = "`MASTER_PORT` is in use"
NO_INIT = "`torchrun`, and no `init()` before `make_loader`"
VARIABLES = {
    "`LOCAL_RANK` is not set": {**LAUNCHED, "LOCAL_RANK": None},
    "`export RANK=0 WORLD_SIZE=2` and `python train.py`": {"RANK": "{rank}", "WORLD_SIZE": "2"},
    "`WORLD_SIZE=two`": {**LAUNCHED, "WORLD_SIZE": "two"},
    "`RANK=7` of 2": {**LAUNCHED, "RANK": "7", "WORLD_SIZE": "2"},
    "`GROUP_RANK=1` of one node": {**LAUNCHED, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "1"},
    "`MASTER_PORT=99999`": {**LAUNCHED, "MASTER_PORT": "99999"},
    "`MASTER_ADDR` that does not resolve": {**LAUNCHED, "MASTER_ADDR": "no-such-host.invalid"},
    PORT_IS_TAKEN: LAUNCHED,
    "`PARDATA_LAUNCHER=srun`": {"PARDATA_LAUNCHER": "srun"},
    "`PARDATA_LAUNCHER=slurm` without `srun`": {"PARDATA_LAUNCHER": "slurm"},
    "a broken `SLURM_STEP_NODELIST`": {**SRUN, "SLURM_STEP_NODELIST": "n[1-"},
    "`mpirun` over several hosts": MPIRUN,
    "a script started by a rank, with its variables": {
        **LAUNCHED, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "PARDATA_JOINED": "1 torchrun:{rank}/2@127.0.0.1:{port}",
    },
    "two ranks on a machine with one GPU": LAUNCHED,
    "`init(device='mps')` in two ranks": LAUNCHED,
    NO_INIT: LAUNCHED,  # before any other function: tests/environment/test_world.py
}  # fmt: skip
CODE = {
    "`init(timeout='5')`": "init(timeout='5')",
    "`init(hang_after='5')`": "init(hang_after='5')",
    "`init(hang_after=-1)`": "init(hang_after=-1)",
    "`init(device='gpu')`": "init(device='gpu')",
    "`init(device='xpu:99')`": "init(device='xpu:99')",
    "`init(device='mps')` in two ranks": "init_on_mps()",
    "two ranks on a machine with one GPU": "init_with_one_gpu()",
    "`wrap_model(model, 'ddp')` in a single process, without `init()`": "wrap_model(model, 'ddp')",
    "`make_loader(data, 4, distributed=True)` without a launcher": (
        "make_loader(data, 4, distributed=True)"
    ),
    NO_INIT: "make_loader(TEN, 4)",
}


def init_with_one_gpu():
    """Join on a machine with one GPU."""
    only = SimpleNamespace(uuid="the only one", total_memory=0)
    with accelerators(1, get_device_properties=lambda _device: only):
        init()


def init_on_mps():
    """Join with MPS, of which each rank pretends to have one."""
    with accelerators(2, kind="mps"):
        init(device="mps")


@functools.cache
def outcomes(size):
    """Return what each of `size` processes raised at each of these rows."""
    with ExitStack() as stack:
        ports = [stack.enter_context(port(taken=row.shown == PORT_IS_TAKEN)) for row in STARTS]
        command = [python(), "-c", "import misuse_launch as t; t.child()"]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(size), *map(str, ports)],
                cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            for rank in range(size)
        ]  # fmt: skip
        for process in processes:
            stack.callback(process.wait)
            stack.callback(process.kill)
        texts = [process.communicate(timeout=100)[0] for process in processes]
    found = [[Raised(**one) if one else None for one in json.loads(text)] for text in texts]
    return [dict(zip(STARTS, each, strict=True)) for each in found]


@contextmanager
def port(*, taken):
    """Yield a port that rank 0 can open and nobody else, or one that somebody listens at."""
    if not taken:
        with reserved_port() as free:
            yield free
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def child():
    """Be one rank of each row in turn; print what was raised."""
    rank, size, *ports = map(int, sys.argv[1:])
    print(json.dumps([raised(row, rank, size, p) for row, p in zip(STARTS, ports, strict=True)]))


def raised(row, rank, size, port):
    if size not in row.sizes:
        return None
    names = (*LAUNCHED, *OPEN_MPI, *MPICH, *SLURM, "GROUP_RANK", "GROUP_WORLD_SIZE")
    for name in (*names, "PARDATA_LAUNCHER", "PARDATA_JOINED"):
        os.environ.pop(name, None)
    for name, text in VARIABLES.get(row.shown, {}).items():
        if text is not None:
            os.environ[name] = text.format(rank=rank, size=size, port=port)
    scope = {**SCOPE, "init_with_one_gpu": init_with_one_gpu, "init_on_mps": init_on_mps}
    outcome = caught(eval, CODE.get(row.shown, "init()"), scope)
    return asdict(outcome) if isinstance(outcome, Raised) else None
