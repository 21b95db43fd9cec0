"""What this process finds on its machine: devices, cores, threads, shared memory, limits."""

import os
import shutil
import socket
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from pardata.data._workers import choose_workers
from pardata.doctor._finding import ERROR, OK, WARNING, Finding, found_error
from pardata.ranks._cores import cpu_quota, usable_cores
from pardata.ranks._world import World

_GIB = 2**30
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # where it is, not a temporary file
_LEAST_SHARED_MEMORY = _GIB  # a container's default of 64 MB is used up by a few batches
_FEWEST_FILES = 1024  # what most systems give; each tensor in flight from a worker takes one


def examine_machine(here: World) -> list[Finding]:
    """Return the findings about this process's machine; `here` says who shares it."""
    findings = [_gpus(), _cores(here), _threads(here)]
    return [*findings, *_shared_memory(), *_sockets(here), *_open_files(), *_network(here)]


def _gpus() -> Finding:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")  # torch warns of a driver that is too old
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        kinds = Counter(_gpu_text(index) for index in range(count))
        return Finding(
            "GPUs", OK, ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
        )
    files = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return hidden_gpus(files, str(said[0].message) if said else "")


def _gpu_text(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"{found.name}, {found.total_memory / _GIB:.0f} GiB"


def hidden_gpus(files: int, said: str) -> Finding:
    """Return what it means that torch sees no GPU where there are so many device files."""
    if not files and not said:
        return Finding("GPUs", OK, "none, so that the CPU computes")
    text = f"torch sees none of {files} in /dev{f' ({said})' if said else ''}"
    if torch.version.cuda is None:
        cure = "install a torch that is built for CUDA"
    elif "CUDA_VISIBLE_DEVICES" in os.environ:
        masked = os.environ["CUDA_VISIBLE_DEVICES"]
        cure = f"unset CUDA_VISIBLE_DEVICES, which is {masked!r}, or set it to GPUs of this machine"
    else:
        cure = f"see with nvidia-smi whether the driver is new enough for CUDA {torch.version.cuda}"
    return Finding("GPUs", WARNING, text, cure)


def _cores(here: World) -> Finding:
    allowed, quota = usable_cores(replace(here, local_size=1)), cpu_quota()
    limit = "" if quota is None else f", with a quota of {quota:g}"
    if here.local_size > allowed:
        text = f"{here.local_size} ranks of this host share {allowed}{limit}"
        cure = f"start at most {allowed} per host, or ask the scheduler for more cores"
        return Finding("cores", WARNING, text, cure)
    whose = "" if here.local_size == 1 else " for each rank"
    return Finding("cores", OK, f"{usable_cores(here)}{whose}, of {os.cpu_count()}{limit}")


def _threads(here: World) -> Finding:
    threads, cores = torch.get_num_threads(), usable_cores(here)
    wish = os.environ.get("OMP_NUM_THREADS")
    why = "OMP_NUM_THREADS is not set" if wish is None else f"OMP_NUM_THREADS={wish}"
    if threads > cores:
        whose = " of each rank" if here.local_size > 1 else ""
        text = f"{threads} on the {cores} core{'s' if cores > 1 else ''}{whose} ({why})"
        return Finding("threads", WARNING, text, f"set OMP_NUM_THREADS={cores}")
    return Finding("threads", OK, f"{threads} ({why})")


def _shared_memory() -> Iterator[Finding]:
    if not Path(_SHARED_MEMORY).exists():  # not on macOS and Windows
        return
    if not os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        cure = "chmod 1777 /dev/shm, or pass num_workers=0"
        yield Finding(_SHARED_MEMORY, ERROR, "it cannot be written to", cure)
        return
    usage = shutil.disk_usage(_SHARED_MEMORY)
    yield shared_memory(usage.total, usage.free)


def shared_memory(total: int, free: int) -> Finding:
    """Return whether so many bytes, of which so many are free, are enough for workers' batches."""
    if free >= _LEAST_SHARED_MEMORY:
        return Finding(_SHARED_MEMORY, OK, _size(total))  # what is free changes all the time
    cure = (
        "workers hand batches over there: start the container with --shm-size=8g or --ipc=host, "
        "remove what other runs have left there, or pass num_workers=0"
    )
    return Finding(_SHARED_MEMORY, WARNING, f"{_size(free)} free of {_size(total)}", cure)


def _size(number: int) -> str:
    return f"{number / _GIB:.1f} GiB" if number >= _GIB else f"{number / 2**20:.0f} MiB"


def _sockets(here: World) -> Iterator[Finding]:
    try:
        choose_workers(1, None, here)
    except ValueError as error:
        yield found_error("sockets", error, "set TMPDIR to a folder with a shorter name")


def _open_files() -> Iterator[Finding]:
    try:
        import resource  # noqa: PLC0415  # not on Windows
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield open_files(*(None if n == resource.RLIM_INFINITY else n for n in (soft, hard)))


def open_files(soft: int | None, hard: int | None) -> Finding:
    """Return whether a process may open enough files; `None` is no limit."""
    texts = ["no limit" if number is None else str(number) for number in (soft, hard)]
    if soft is None or soft >= _FEWEST_FILES:
        return Finding("open files", OK, f"at most {texts[0]}" if soft else texts[0])
    cure = (
        f"ulimit -n {_FEWEST_FILES * 4 if hard is None else min(hard, _FEWEST_FILES * 4)}: each "
        f"tensor that a worker hands over takes one"
    )
    return Finding("open files", WARNING, f"at most {texts[0]} (ulimit -Hn: {texts[1]})", cure)


def _network(here: World) -> Iterator[Finding]:
    """Look at what gloo goes by: the interface that it was told, else this host's own name."""
    wish = os.environ.get("GLOO_SOCKET_IFNAME")
    if wish is not None:
        there = [name for _, name in socket.if_nameindex()]
        if set(wish.split(",")) <= set(there):
            yield Finding("network", OK, f"GLOO_SOCKET_IFNAME={wish}")
            return
        text = f"GLOO_SOCKET_IFNAME must name an interface of this host, but is {wish!r}"
        yield Finding("network", ERROR, text, f"set it to one of {', '.join(there)}, or unset it")
        return
    yield own_address(socket.gethostname(), alone=here.num_nodes == 1)


def own_address(host: str, *, alone: bool) -> Finding:
    """Return whether other hosts can reach the address to which this host's name leads."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        problem = f"the host's name, {host}, does not resolve ({error})"
    else:
        address = str(found[0][4][0])
        if not (address.startswith("127.") or address == "::1"):
            return Finding("network", OK, "the host's name resolves")
        problem = f"the host's name, {host}, is {address} and leads nowhere else"
    if alone:
        return Finding("network", OK, f"{problem}: enough for one host")
    cure = "set GLOO_SOCKET_IFNAME to the interface that leads to the others, as eth0"
    return Finding("network", WARNING, problem, cure)
