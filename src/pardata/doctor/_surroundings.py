"""What this process finds: its launcher, the machine's devices and limits, what is installed."""

import os
import platform
import shutil
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from pardata.doctor._report import Finding, found_error
from pardata.ranks._backend import backend_for
from pardata.ranks._device import hidden_devices, properties_of, visible_devices
from pardata.ranks._launcher import LAUNCHERS, Launch, Launcher, detect, launcher_of
from pardata.ranks._machine import cpu_quota, usable_cores
from pardata.ranks._version import __version__
from pardata.ranks._world import World

_GIB = 2**30
_SHARED_MEMORY = "/dev/shm"  # noqa: S108  # where it is, not a temporary file
_LEAST_SHARED_MEMORY = _GIB  # a container's default of 64 MB is used up by a few batches
_FEWEST_FILES = 1024  # what most systems give; each tensor in flight from a worker takes one
# In both releases of the unrelated distribution `pardata`, 0.3.0 and 0.4.0, and never in ours.
_THEIRS = "_high_level.py"
_CURE = "correct it, or set PARDATA_LAUNCHER=none to run as a single process"


def examine_launcher(env: Mapping[str, str]) -> tuple[Launch | None, list[Finding]]:
    """Return what a launcher told this process, `None` if that is wrong, and the findings."""
    there = {one.text: [name for name in one.marks if name in env] for one in LAUNCHERS}
    seen = {family: f"{', '.join(names)} ({family})" for family, names in there.items() if names}
    try:
        launch, chosen = detect(env), launcher_of(env)
    except ValueError as error:
        # All that is there, for somebody who must find out what is wrong with it.
        variables = [Finding("variables", "; ".join(seen.values()))] if seen else []
        return None, [found_error("launcher", error, _CURE), *variables]
    name = chosen.text if chosen else ""
    ignored = [_ignored(text, name, env) for family, text in seen.items() if family != name]
    return launch, [Finding("launcher", _chosen_text(launch, chosen, env)), *ignored]


def _chosen_text(launch: Launch, chosen: Launcher | None, env: Mapping[str, str]) -> str:
    choice = env.get("PARDATA_LAUNCHER", "auto")
    how = "" if choice == "auto" else f", as PARDATA_LAUNCHER={choice} says"
    if chosen is None:
        return f"none{how}: a single process"
    processes = f"{launch.size} process{'es' if launch.size > 1 else ''}"
    address, names = f"{launch.master_addr}:{launch.master_port}", ", ".join(chosen.variables)
    return f"{chosen.text}{how}: {processes}, to meet at {address}; from {names}"


def _ignored(text: str, chosen: str, env: Mapping[str, str]) -> Finding:
    if chosen or env.get("PARDATA_LAUNCHER", "auto") != "auto":
        return Finding("ignored", text)  # the line above says who was chosen, and by whom
    if "SLURM_STEP_ID" in env:
        return Finding("ignored", f"{text}: of a step of one task")
    tasks = env.get("SLURM_NTASKS", "1")
    cure = f"start the script with srun, to be the {tasks} tasks that the job asked for"
    text = f"{text}: of the shell of a job, not of a step"
    return Finding("ignored", text, cure if tasks != "1" else "")


def surroundings(here: World) -> Iterator[Finding]:
    """Yield what this process finds around itself; `here` says who shares the machine."""
    yield from (_gpus(), _cores(here), _threads(here))
    if Path(_SHARED_MEMORY).exists():  # not on macOS and Windows
        usage = shutil.disk_usage(_SHARED_MEMORY)
        yield shared_memory(usage.total, usage.free)
    yield from _open_files()
    yield from (_network(here), _versions())
    yield from shared_package(Path(__file__).parents[1])


def place(here: World) -> Finding:
    """Return where a rank is."""
    gpu = "" if here.device.type == "cpu" else f" {properties_of(here.device).name}"
    node = f"{socket.gethostname()}, node {here.node_rank}, local rank {here.local_rank}"
    return Finding("place", f"{node}, {here.device}{gpu}, cores: {usable_cores(here)}")


def _gpus() -> Finding:
    if (hidden := hidden_devices()) is not None:
        return Finding("GPUs", *hidden)
    if not (seen := visible_devices()):
        return Finding("GPUs", "none: training runs on the CPU")
    told = map(properties_of, seen)
    kinds = Counter(f"{gpu.name}, {gpu.total_memory / _GIB:.0f} GiB" for gpu in told)
    found = ", ".join(f"{number} x {kind}" for kind, number in kinds.items())
    return Finding("GPUs", f"{found}; backend {backend_for(seen[0])}")


def _cores(here: World) -> Finding:
    allowed, quota = usable_cores(replace(here, local_size=1)), cpu_quota()
    limit = "" if quota is None else f", with a quota of {quota:g}"
    if here.local_size > allowed:
        text = f"{here.local_size} ranks of this host share {allowed}{limit}"
        cure = f"start at most {allowed} per host, or ask the scheduler for more cores"
        return Finding("cores", text, cure)
    return Finding("cores", f"{usable_cores(here)} per process, of {os.cpu_count()}{limit}")


def _threads(here: World) -> Finding:
    threads, cores = torch.get_num_threads(), usable_cores(here)
    wish = os.environ.get("OMP_NUM_THREADS", "not set")
    text = f"{threads} per process (OMP_NUM_THREADS: {wish})"
    cure = f"set OMP_NUM_THREADS={cores}, as each process has {cores} of the cores"
    return Finding("threads", text, cure if threads > cores else "")


def shared_memory(total: int, free: int) -> Finding:
    """Return whether so many bytes, of which so many are free, are enough for workers' batches."""
    if free >= _LEAST_SHARED_MEMORY:
        return Finding(_SHARED_MEMORY, _size(total))  # what is free changes all the time
    cure = (
        "workers hand batches over there: start the container with --shm-size=8g or --ipc=host, "
        "remove what other runs have left there, or pass num_workers=0"
    )
    return Finding(_SHARED_MEMORY, f"{_size(free)} free of {_size(total)}", cure)


def _size(number: int) -> str:
    return f"{number / _GIB:.1f} GiB" if number >= _GIB else f"{number / 2**20:.0f} MiB"


def _open_files() -> Iterator[Finding]:
    try:
        import resource  # noqa: PLC0415  # not on Windows
    except ImportError:
        return
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    cure = "ulimit -n $(ulimit -Hn): each tensor that a worker hands over takes one"
    text = "no limit" if most == resource.RLIM_INFINITY else f"at most {most}"
    yield Finding("open files", text, cure if 0 <= most < _FEWEST_FILES else "")


def _network(here: World) -> Finding:
    """Look at what gloo goes by: the interface that it was told, else this host's own name."""
    wish = os.environ.get("GLOO_SOCKET_IFNAME")
    if wish is None:
        alone = Finding("network", "one host, where the loopback interface will do")
        return alone if here.num_nodes == 1 else own_address(socket.gethostname())
    there = [name for _, name in socket.if_nameindex()]
    if set(wish.split(",")) <= set(there):
        return Finding("network", f"GLOO_SOCKET_IFNAME={wish}")
    text = f"GLOO_SOCKET_IFNAME must name an interface of this host, but is {wish!r}"
    cure = f"set it to one of {', '.join(there)}, or unset it"
    return Finding("network", text, cure, is_error=True)


def own_address(host: str) -> Finding:
    """Return whether other hosts can reach the address to which this host's name resolves."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        problem = f"the host name {host} does not resolve: {error}"
    else:
        if not (address.startswith("127.") or address == "::1"):
            return Finding("network", "the host name resolves")
        problem = f"the host name {host} resolves to {address}"
    cure = "set GLOO_SOCKET_IFNAME to the interface that leads to the other hosts, as eth0"
    return Finding("network", f"{problem}, where other hosts cannot reach it", cure)


def _versions() -> Finding:
    python = platform.python_version()
    text = f"pardata {__version__}, torch {torch.__version__}, Python {python}"
    return Finding("versions", text)


def shared_package(package: Path) -> Iterator[Finding]:
    """Find the files of the unrelated distribution `pardata` between ours.

    Its top-level package has our name: in one environment the two share a directory, and whichever
    was installed last has the ``__init__.py``.
    """
    if (package / _THEIRS).exists():
        text = (
            f"`torch-pardata` must not share an environment with the distribution `pardata`, an "
            f"unrelated data-set tool, but the files of both are in {package}"
        )
        cure = (
            "remove both with `python -m pip uninstall --yes pardata torch-pardata`, then run "
            "`python -m pip install torch-pardata`"
        )
        yield Finding("installation", text, cure, is_error=True)
