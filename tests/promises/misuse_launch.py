"""A process that was started wrongly: an error at once on every rank, with cause and cure.

Real processes with a launcher's variables and no group. Each goes through all cases, so none of
them may join.
"""

import functools
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from launched import reserved_port, slurm_variables, torchrun_variables
from misuse import SCOPE, Case, table
from on_ranks import Raised, caught
from torch.utils.data import TensorDataset

from pardata import init
from pardata.ranks._launcher import MPICH, OPEN_MPI, SLURM, TORCHRUN

THIS = sys.modules[__name__]
TEN = TensorDataset(torch.arange(10))

BOTH = (1, 2)
# "{rank}", "{size}" and "{port}" are filled in on each rank.
LAUNCHED = {name: text for name, text in torchrun_variables("{rank}", "{size}", "{port}").items()
            if name in TORCHRUN}  # fmt: skip
SRUN = slurm_variables("{rank}", 2, None, SLURM_JOB_ID="7", MASTER_PORT=None)
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


@dataclass(frozen=True)
class Launch(Case):
    """A bad start: `code` in processes with these variables, of which `None` takes one away."""

    env: dict[str, str | None] = field(default_factory=dict)
    port_taken: bool = False

    @property
    def shown(self):
        return self.label


def launch(label, env, kind, *says, code="init()", **options):
    return Launch(code, kind, says, env=env, label=label, **{"sizes": BOTH, **options})


def one_gpu():
    """Be on a machine with one GPU."""
    cuda = torch.cuda
    before = {
        name: getattr(cuda, name)
        for name in ("is_available", "device_count", "set_device", "get_device_properties")
    }
    cuda.is_available, cuda.device_count = lambda: True, lambda: 1
    cuda.set_device = lambda _device: None
    cuda.get_device_properties = lambda _device: SimpleNamespace(uuid="the only one")
    try:
        init()
    finally:
        for name, value in before.items():
            setattr(cuda, name, value)


CASES = {
    "init": [
        launch("`LOCAL_RANK` is not set", {**LAUNCHED, "LOCAL_RANK": None}, "ValueError",
               "`LOCAL_RANK` must still be set in addition to `RANK`, `WORLD_SIZE`",
               "start the script with the launcher itself, or set PARDATA_LAUNCHER=none"),
        launch("`export RANK=0 WORLD_SIZE=2` and `python train.py`",
               {"RANK": "{rank}", "WORLD_SIZE": "2"}, "ValueError",
               "`MASTER_ADDR`", "must still be set in addition to `RANK`, `WORLD_SIZE`"),
        launch("`WORLD_SIZE=two`", {**LAUNCHED, "WORLD_SIZE": "two"}, "ValueError",
               "`WORLD_SIZE` must be a whole number, but is 'two'"),
        launch("`RANK=7` of 2", {**LAUNCHED, "RANK": "7", "WORLD_SIZE": "2"}, "ValueError",
               "the rank must be less than the world size (2), but torchrun set it to 7",
               "RANK, WORLD_SIZE", "contradict"),
        launch("`GROUP_RANK=1` of one node",
               {**LAUNCHED, "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "1"}, "ValueError",
               "the rank of the node must be less than the number of nodes (1)", "GROUP_*"),
        launch("`MASTER_PORT=99999`", {**LAUNCHED, "MASTER_PORT": "99999"}, "ValueError",
               "`MASTER_PORT` must be between 1 and 65535, but is 99999"),
        launch("`MASTER_ADDR` that does not resolve",
               {**LAUNCHED, "MASTER_ADDR": "no-such-host.invalid"}, "RuntimeError",
               "`MASTER_ADDR` must be a host that resolves, but 'no-such-host.invalid' does not",
               "set MASTER_ADDR to an address that every rank can reach", ours=False),
        launch("`MASTER_PORT` is in use", LAUNCHED, "RuntimeError", "is in use",
               "set MASTER_PORT to a free port", sizes=(1,), port_taken=True, ours=False),
        launch("`PARDATA_LAUNCHER=srun`", {"PARDATA_LAUNCHER": "srun"}, "ValueError",
               "`PARDATA_LAUNCHER` must be one of auto, torchrun, slurm, mpi, none, but is 'srun'"),
        launch("`PARDATA_LAUNCHER=slurm` without `srun`", {"PARDATA_LAUNCHER": "slurm"},
               "ValueError", "the variables of a SLURM step must be set together",
               "must still be set: start the script with the launcher itself"),
        launch("`srun`, and `export WORLD_SIZE=4` for 2 tasks", {**SRUN, "WORLD_SIZE": "4"},
               "ValueError", "`WORLD_SIZE` must be 2, as SLURM says, but is 4",
               "unset it, or choose one launcher with PARDATA_LAUNCHER", sizes=(2,)),
        launch("a broken `SLURM_STEP_NODELIST`", {**SRUN, "SLURM_STEP_NODELIST": "n[1-"},
               "ValueError", "a SLURM node list must look like 'a[1-3,7],b2', but is 'n[1-'",
               "`SLURM_STEP_NODELIST`"),
        launch("`mpirun` over several hosts", MPIRUN, "ValueError",
               "`MASTER_ADDR` must be set when MPI spans several hosts (1 of 2 ranks are on this "
               "one), but is not: add `-x MASTER_ADDR=<host of rank 0>`"),
        launch("a script started by a rank, with its variables",
               {**LAUNCHED, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "PARDATA_JOINED": "1 torchrun:{rank}/2@127.0.0.1:{port}"}, "RuntimeError",
               "this process inherited the variables of rank", "which process 1 has already joined",
               "PARDATA_LAUNCHER=none"),
        launch("`init(timeout='5')`", {}, "TypeError", "`timeout` must be seconds or a datetime",
               "but is '5'", code="init(timeout='5')"),
        launch("`init(device='gpu')`", {}, "RuntimeError", "gpu", code="init(device='gpu')",
               ours=False),
        launch("two ranks on a machine with one GPU", LAUNCHED, "RuntimeError",
               "must be less than the number of visible GPUs, 1, but is 1", "--nproc-per-node=1",
               code="one_gpu()", sizes=(2,)),
    ],
    "world": [
        *[launch(f"`torchrun`, and no `init()` before `{name}`", LAUNCHED, "RuntimeError",
                 f"`{name}` needs the process group", "call it first", code=code, sizes=(2,))
          for name, code in {
              "make_loader": "make_loader(TEN, 4)",
              "wrap_model": "wrap_model(nn.Linear(1, 1))",
              "all_reduce_mean": "all_reduce_mean(1.0)",
              "Checkpointer.save": "Checkpointer('run').save(1)",
              "StopSignal.agreed": "StopSignal().agreed()",
          }.items()],
        launch("`wrap_model(model, 'ddp')` in a single process, without `init()`", {},
               "RuntimeError", "strategy 'ddp' needs a process group", "pardata.init()",
               code="wrap_model(nn.Linear(1, 1), 'ddp')", sizes=(1,)),
        launch("`make_loader(data, 4, distributed=True)` without a launcher", {}, "RuntimeError",
               "`distributed` must be 'auto' or False without a launcher", "torchrun",
               code="make_loader(TEN, 4, distributed=True)", sizes=(1,)),
    ],
}  # fmt: skip


@functools.cache
def outcomes(size):
    """Start `size` processes that try all cases; return what each raised."""
    with ExitStack() as taken:
        ports = [taken.enter_context(port(taken=each.port_taken)) for each in table(THIS)]
        command = [sys.executable, "-c", "import misuse_launch as t; t.child()"]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(size), *map(str, ports)],
                cwd=Path(__file__).parent,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        try:
            texts = [process.communicate(timeout=100)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return [[Raised(**one) if one else None for one in json.loads(text)] for text in texts]


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
    """Be one rank of each case in turn; print what was raised."""
    rank, size, *ports = map(int, sys.argv[1:])
    print(json.dumps(list(raised(rank, size, ports))))


def raised(rank, size, ports):
    for each, own in zip(table(THIS), ports, strict=True):
        if size not in each.sizes:
            continue
        names = (*LAUNCHED, *OPEN_MPI, *MPICH, *SLURM, "GROUP_RANK", "GROUP_WORLD_SIZE")
        for name in (*names, "PARDATA_LAUNCHER", "PARDATA_JOINED"):
            os.environ.pop(name, None)
        env = {name: text for name, text in each.env.items() if text is not None}
        os.environ.update(
            {name: text.format(rank=rank, size=size, port=own) for name, text in env.items()}
        )
        outcome = caught(eval, each.code, {**SCOPE, **vars(THIS)})
        yield asdict(outcome) if isinstance(outcome, Raised) else None
