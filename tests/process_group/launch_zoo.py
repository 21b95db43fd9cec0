"""What the tests of joining share: torchrun itself, and the variables of other launchers."""

import os
import subprocess

from forked import python


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


def open_mpi_variables(rank, size, port, local_size=None):
    """Return Open MPI's variables, which say nothing about the number of nodes."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    local_size = local_size or size
    values = map(str, (rank, size, rank % local_size, local_size))
    env = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, values, strict=True)}
    return env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
