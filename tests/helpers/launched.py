"""Ranks as a launcher starts them: real processes with its variables, and no group yet."""

import os
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from on_ranks import caught, run


def torchrun_variables(rank, size, port, **changes):
    """Return torchrun's variables for a rank on one host; ``None`` takes one away."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    env = dict(zip(names, map(str, (rank, size, rank, size, 0)), strict=True))
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_WORLD_SIZE": "1"}
    env |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {name: value for name, value in (env | changes).items() if value is not None}


def slurm_variables(rank, size, port, **changes):
    """Return SLURM's variables for a task of a step on this host; ``None`` takes one away."""
    env = {
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "MASTER_PORT": str(port),
    }
    return {name: value for name, value in (env | changes).items() if value is not None}


@contextmanager
def agent():
    """Serve a store as torchrun's agent does, and yield its port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


@contextmanager
def reserved_port():
    """Yield a port that rank 0 can open and nobody else gets: bound here, but not listening."""
    with socket.socket(socket.AF_INET6) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("::", 0))
        yield holder.getsockname()[1]


def launched(fn, *args, size, variables=torchrun_variables, patience=120, **changes):
    """Run ``fn(*args)`` on ranks that have a launcher's variables; return results or `Raised`."""
    meeting = agent() if variables is torchrun_variables else reserved_port()
    with meeting as port, tempfile.TemporaryDirectory() as directory:
        environments = [variables(rank, size, port, **changes) for rank in range(size)]
        given = environments, directory, fn, args
        return run(as_rank, *given, world_size=size, timeout=patience, fresh=True)


def as_rank(environments, directory, fn, args):
    """Give up the group of `run`, be what the variables say, and put a group back for `run`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(str(Path(directory) / "store"), size)
    # Some tests wait a second for the others, who may still be importing this one.
    store.set(f"is there/{rank}", "")
    store.wait([f"is there/{other}" for other in range(size)])
    dist.destroy_process_group()
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update(environments[rank])
    result = caught(fn, *args)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return result
