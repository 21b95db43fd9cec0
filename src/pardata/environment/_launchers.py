"""Detects the launcher that started this process: a pure function of the environment variables.

It touches no process group, socket or device, so tests pass plain dictionaries. `LAUNCHERS` has
them in order of precedence, and after them comes a single process. Open MPI goes before SLURM
because the SLURM variables under ``mpirun`` are those of its daemon.
"""

import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

Env: TypeAlias = Mapping[str, str]

# Without MASTER_ADDR and MASTER_PORT, which users export for other launchers too.
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TORCHRUN = (*_OF_TORCHRUN, "MASTER_ADDR", "MASTER_PORT")
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_CRAY = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
_OF_RANK = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
OPEN_MPI, _MVAPICH, _JSRUN, _HOROVOD = (
    tuple(f"{prefix}_{name}" for name in _OF_RANK)
    for prefix in ("OMPI_COMM_WORLD", "MV2_COMM_WORLD", "JSM_NAMESPACE", "HOROVOD")
)
_FLUX = ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_NNODES")
# submitit's local executor, which starts all tasks on one host.
_SUBMITIT = tuple(f"SUBMITIT_LOCAL_{name}" for name in ("GLOBALID", "NTASKS", "LOCALID", "NTASKS"))
# Variables of launchers that do not set the size for each process, and one that users set.
_UNREAD = ("PALS_RANKID", "ALPS_APP_PE", "MPT_LRANK", "DMLC_WORKER_ID", "MASTER_ADDR")
_OF_TASK = ("PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID")
_OF_STEP = ("STEP_ID", "STEP_NODELIST", "STEP_TASKS_PER_NODE", "JOB_ID")
SLURM = tuple(f"SLURM_{name}" for name in (*_OF_TASK, *_OF_STEP))
_OPT_OUT = "set PARDATA_LAUNCHER=none to run as a single process"


class LaunchInfo(NamedTuple):
    """The values from a launcher's variables; ``None`` if it has no such variable."""

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int | None
    num_nodes: int | None
    master_addr: str
    master_port: int

    @property
    def endpoint(self) -> str:
        """Address and port."""
        return f"{self.master_addr}:{self.master_port}"

    @property
    def launch_id(self) -> str:
        """A text that names this rank of this run. Subprocesses inherit it with the variables."""
        return f"{self.launcher}:{self.rank}/{self.size}@{self.endpoint}"


SINGLE = LaunchInfo("single", 0, 1, 0, 1, 0, 1, "", 0)


class Launcher(NamedTuple):
    """A launcher, its variables, and the functions that read them.

    Attributes:
        name: the value of `World.launcher` and `PARDATA_LAUNCHER`; two launchers may share it.
        variables: the variables that it sets for each process, and that `read` needs.
        prefixes: prefixes of the names of all variables that it may set.
        started: returns whether it started the process with these variables.
        read: returns the `LaunchInfo`.
    """

    name: str
    variables: tuple[str, ...]
    prefixes: tuple[str, ...]
    started: Callable[[Env], bool]
    read: Callable[[Env], LaunchInfo]


def detect_launch(env: Env) -> LaunchInfo:
    """Read the launcher's variables, or return ``SINGLE`` if none started this process.

    Raises:
        ValueError: variables are missing, contradictory or not numeric, or ``PARDATA_LAUNCHER`` is
            unknown. The error names the variable.
    """
    launcher = select_launcher(env)
    if launcher is None:
        return SINGLE
    launch = launcher.read(env)
    _check_bounds(launch, launcher)
    return launch


def select_launcher(env: Env) -> Launcher | None:
    """Return the launcher of `PARDATA_LAUNCHER`, else the first that started this process."""
    choice = env.get("PARDATA_LAUNCHER", "auto")
    choices = ("auto", *dict.fromkeys(launcher.name for launcher in LAUNCHERS), "none")
    if choice not in choices:
        msg = f"`PARDATA_LAUNCHER` must be one of {', '.join(choices)}, but is {choice!r}"
        raise ValueError(msg)
    among = [launcher for launcher in LAUNCHERS if choice in ("auto", launcher.name)]
    found = [launcher for launcher in among if launcher.started(env)]
    if choice == "auto":  # `read` raises an error for a part of torchrun's variables
        among = LAUNCHERS[:1] if _has_any(_OF_TORCHRUN, env) else []
    # `read` names what is missing, so of a chosen name the launcher with most variables.
    most = max(among, key=lambda one: sum(name in env for name in one.variables), default=None)
    return next(iter(found), most)


def unread_variable(env: Env) -> str | None:
    """Return a variable that suggests several processes, and that no launcher's rows have."""
    return next(filter(env.get, _UNREAD), None)


def _has_any(names: tuple[str, ...], env: Env) -> bool:
    return any(name in env for name in names)


def _is_slurms(env: Env) -> bool:
    # sbatch sets SLURM_PROCID and SLURM_NTASKS for a plain `python` too. Only srun starts a step.
    is_step = env.get("SLURM_STEP_ID", "").isdecimal()
    return is_step and read_int(env, "SLURM_STEP_NUM_TASKS") > 1


def _is_mpichs(env: Env) -> bool:
    # srun --mpi=pmi2 sets PMI_* also in a SLURM step of one task, which is a single process.
    return _has_any(MPICH, env) and "SLURM_STEP_ID" not in env


def _torchrun(env: Env) -> LaunchInfo:
    rank, size, local_rank, local_size = _numbers(env, TORCHRUN, "torchrun")
    numbers = read_ints(env, ("GROUP_RANK", "GROUP_WORLD_SIZE"))
    node, nodes = numbers.get("GROUP_RANK"), numbers.get("GROUP_WORLD_SIZE")
    place = node, nodes, env["MASTER_ADDR"], _port(env, 0)  # address and port are set
    return LaunchInfo("torchrun", rank, size, local_rank, local_size, *place)


def _mpi(name: str, who: str, names: tuple[str, ...], env: Env) -> LaunchInfo:
    """Read the ranks and sizes that MPI and its like set; they set no address."""
    rank, size, local_rank, local_size = _numbers(env, names, who)
    if names is _FLUX:  # its last number is that of nodes
        local_size = -(-size // local_size)
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if local_size == size else "")
    if not address:
        option = {"Open MPI": "-x MASTER_ADDR=", "MPICH": "-genv MASTER_ADDR "}
        msg = f"`MASTER_ADDR` must be set when {who} spans several hosts ({local_size} of {size} "
        msg += "ranks are on this one), but is not: add "
        msg += f"`{option.get(who, 'export MASTER_ADDR=')}<host of rank 0>` to the command"
        raise ValueError(msg)
    # Each mpirun has another namespace, so two runs on one host get two ports.
    namespace = env.get("PMIX_NAMESPACE", "").encode()
    port = 15000 + zlib.crc32(namespace) % 10000 if names is OPEN_MPI else 29500
    place = None, None, address, _port(env, port)  # nor a number of the node
    return LaunchInfo(name, rank, size, local_rank, local_size, *place)


def _mpi_like(name: str, who: str, names: tuple[str, ...], *prefixes: str) -> "Launcher":
    started, read = partial(_has_any, names), partial(_mpi, name, who, names)
    return Launcher(name, names, prefixes, started, read)


def _slurm(env: Env) -> LaunchInfo:
    rank, size, local_rank, node = _numbers(env, SLURM, "a SLURM step")
    local_size, nodes = _tasks_at(node, env["SLURM_STEP_TASKS_PER_NODE"])
    # The same rule as Lightning and Ignite, plus the step, so that two steps of a job differ.
    job, step = read_int(env, "SLURM_JOB_ID"), read_int(env, "SLURM_STEP_ID")
    port = _port(env, 15000 + (job % 10000 + step) % (65536 - 15000))
    address = env.get("MASTER_ADDR") or first_host(env["SLURM_STEP_NODELIST"])
    return LaunchInfo("slurm", rank, size, local_rank, local_size, node, nodes, address, port)


def _tasks_at(node: int, text: str) -> tuple[int, int]:
    """Return the number of tasks of `node`, and of nodes: ``"2(x3),1"`` has 4 nodes."""
    tasks, nodes = 0, 0
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", item)
        if match is None:
            raise ValueError(f"`SLURM_STEP_TASKS_PER_NODE` must look like '2(x3)', but is {text!r}")
        tasks = int(match[1]) if nodes <= node else tasks
        nodes += int(match[2] or 1)
    return tasks, nodes


def first_host(text: str) -> str:
    """Return the first host of a SLURM node list: ``a03`` of ``"a[03-11,20],b2"``.

    Raises:
        ValueError: the text is no node list.
    """
    number = "[0-9]{1,18}"  # int() would accept digits of any script
    item = f"{number}(?:-{number})?"
    entry = rf"(?:[^\[\],\s]|\[{item}(?:,{item})*\])+"
    if re.fullmatch(f"{entry}(?:,{entry})*", text) is None:
        msg = f"a SLURM node list must look like 'a[1-3,7],b2', but is {text!r}: correct "
        msg += f"`SLURM_STEP_NODELIST`, or {_OPT_OUT}"
        raise ValueError(msg)
    # Replaces each bracket by its first number, with its leading zeros.
    return re.sub(r"\[([0-9]+).*?\]", r"\1", text).split(",", 1)[0]


def _numbers(env: Env, names: tuple[str, ...], launcher: str) -> list[int]:
    """Return the first four variables as integers; raise if any of `names` is missing."""
    present = [f"`{name}`" for name in names if env.get(name)]
    missing = [f"`{name}`" for name in names if not env.get(name)]
    if missing:
        also = f" in addition to {', '.join(present)}" if present else ""
        msg = f"the variables of {launcher} must be set together, but {', '.join(missing)} must "
        msg += f"still be set{also}: start the script with the launcher itself, or {_OPT_OUT}"
        raise ValueError(msg)
    return [read_int(env, name) for name in names[:4]]


def read_int(env: Env, name: str) -> int:
    """Return the variable `name` as a number, or raise a `ValueError` that shows it."""
    text = env.get(name, "")
    # `isascii`, because int() accepts digits of any script. More than 18 digits cannot be a count.
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        msg = f"`{name}` must be a whole number, but is {text!r}: correct it, or {_OPT_OUT}"
        raise ValueError(msg)
    return int(text)


def read_ints(env: Env, names: Iterable[str]) -> dict[str, int]:
    """Return the variables that are set, as integers."""
    return {name: read_int(env, name) for name in names if env.get(name)}


def _port(env: Env, default: int) -> int:
    port = read_ints(env, ["MASTER_PORT"]).get("MASTER_PORT", default)
    if not 0 < port < 65536:
        raise ValueError(f"`MASTER_PORT` must be between 1 and 65535, but is {port}")
    return port


def _check_bounds(launch: LaunchInfo, launcher: Launcher) -> None:
    for value, bound, name, of in (
        (launch.rank, launch.size, "rank", "world size"),
        (launch.local_rank, launch.local_size, "local rank", "local world size"),
        (launch.local_size, launch.size + 1, "local world size", "world size plus one"),
        (launch.node_rank, launch.num_nodes, "rank of the node", "number of nodes"),
    ):
        if value is not None and bound is not None and value >= bound:
            msg = f"the {name} must be less than the {of} ({bound}), but {launch.launcher} set it "
            msg += f"to {value}: the variables {', '.join(launcher.variables)} contradict each "
            msg += f"other, or are left over from another run; {_OPT_OUT}"
            raise ValueError(msg)


_TORCHRUNS = ("TORCHELASTIC_", "GROUP_", "NODE_RANK")
# In order of precedence.
LAUNCHERS = [
    Launcher("torchrun", TORCHRUN, _TORCHRUNS, lambda env: all(map(env.get, TORCHRUN)), _torchrun),
    _mpi_like("mpi", "Open MPI", OPEN_MPI, "OMPI_", "PMIX_"),
    _mpi_like("submitit", "submitit", _SUBMITIT, "SUBMITIT_LOCAL_"),
    _mpi_like("flux", "Flux", _FLUX, "FLUX_"),
    Launcher("slurm", SLURM, ("SLURM_",), _is_slurms, _slurm),
    _mpi_like("mpi", "MVAPICH2", _MVAPICH, "MV2_"),
    _mpi_like("mpi", "jsrun", _JSRUN, "JSM_"),
    _mpi_like("horovod", "Horovod", _HOROVOD, "HOROVOD_"),
    _mpi_like("mpi", "PALS", _CRAY, "PMI_LOCAL")._replace(started=partial(_has_any, _CRAY[2:])),
    _mpi_like("mpi", "MPICH", MPICH, "PMI_", "MPI_LOCAL")._replace(started=_is_mpichs),
]
