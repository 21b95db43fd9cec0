"""Whether a GPU does what pardata expects of it: checks for the first day on a new machine.

    python benchmarks/gpu_first_day.py
    python benchmarks/gpu_first_day.py --checks operations exact --save
    python benchmarks/gpu_first_day.py --device cpu    # a dry run: every check, at its smallest

Prints a table: what each check finds; what is expected, with the figures of an H100 with torch 2.11
in parentheses; and what another figure refutes. Each check runs in a process of its own: one that
fails or hangs costs only itself. All take at most 8 minutes on one GPU, and no network. A dry run
has other figures: it shows only that each check runs.

- environment: versions, and flags that decide what is computed.
- meshes: the backends that device meshes get.
- ends: how two ranks on the GPU end after an error of one, with a watchdog of NCCL in each.
- probe: whether the record of "exact" sees the flags.
- operations: whether six runs have the same bits, and whether the host waits.
- graphs: microbatches in a CUDA graph.
- lstm: the host wait of a recurrent net with dropout.
- exact: "exact" over "ddp" with the same microbatches.
- two_ranks: a step of the README's loop over DDP by hand, and with what it does for a second rank.
- seeding: of a microbatch.
- prefetch: how many batches are in memory.
- saves: how long an asynchronous save stops the loop.

exact and two_ranks also count launches, copies, and waits of the host, in a step.

On the simulated accelerator of the tests, which has no LSTM and no CTC loss, keeps the memory that
prefetch looks at, and compiles, launches and pins nothing:

    built=$(PYTHONPATH=tests/gpu python -m simulated.building)
    PYTHONPATH=tests/gpu:$built python benchmarks/gpu_first_day.py --device sim --dry

Needs torchvision.
"""

import copy
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from _gpu_loops import by_hand, nets, readme, ready, synchronize, timed
from _gpu_operations import RAISES, Case, cases, differentiated
from _measure import Report, alternate, parser
from _nets import Block, mean_loss
from _targets import TARGETS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile, supported_activities
from torch.utils.data import TensorDataset

import pardata
from pardata.rng._rng_state import fork_torch_rng
from pardata.strategies import _step_metrics
from pardata.strategies._step import DistributedStep
from pardata.strategies.exact._numerics import numerics_record

SECONDS, ALL_SECONDS = 100, 480  # of a check, of all
# What CUDA and ROCm are called for. The profiler itself waits, for the whole device, at its end.
CALLS = {
    "LaunchKernel": "launches",
    "MemcpyAsync": "copies",
    "MemsetAsync": "copies",
    "StreamSynchronize": "waits",
    "EventSynchronize": "waits",
}


@dataclass(frozen=True)
class Place:
    """Where a check runs: on which device, whether at full size, with how many rounds."""

    device: torch.device
    is_full: bool
    rounds: int

    @property
    def of_kind(self) -> Any:
        """The module of torch for devices of this kind."""
        return torch.get_device_module(self.device)


@dataclass(frozen=True)
class Finding:
    """A line of the table."""

    what: str
    found: object
    expected: str = ""
    refutes: str = ""
    check: str = ""


Findings = Iterator[Finding]


def first_line(error: Exception) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:90]}"


def host_waits(work: Callable[[], object], place: Place) -> str:
    """Return whether the host waits for the device in `work`."""
    set_mode = getattr(place.of_kind, "set_sync_debug_mode", None)
    if set_mode is None:
        work()
        return "unknown whether the host waits"
    set_mode("error")
    try:
        work()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return "the host waits"
    finally:
        set_mode("default")
    return "no host wait"


def counted(block: Callable[[], object], steps: int) -> str:
    """Return what the profiler counts in a step, on CUDA and ROCm."""
    synchronize()
    with profile(activities=supported_activities()) as seen:
        block()
    counts: Counter[str] = Counter()
    for event in seen.key_averages():
        for call in (call for call in CALLS if call in event.key):
            counts[CALLS[call]] += event.count
    return ", ".join(f"{counts[kind] / steps:g} {kind}" for kind in dict.fromkeys(CALLS.values()))


def environment(place: Place) -> Findings:
    """Look at versions and flags."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if place.device.type == "cuda":
        about = torch.version.cuda, cudnn.version(), torch.cuda.nccl.version()
        yield Finding("device; CUDA, cuDNN, NCCL", (torch.cuda.get_device_name(), *about))
    flags = cuda.allow_tf32, cudnn.allow_tf32, cuda.allow_bf16_reduced_precision_reduction
    what = "TF32 of matmul, of cuDNN; reduced sums in bfloat16"
    yield Finding(what, flags, "(False, True, True)", "the figures below are of others")
    pardata.seed_everything(0, deterministic=True)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield Finding("fills new memory with NaN", fills, "False", "a kernel more for each tensor")


def meshes(place: Place) -> Findings:
    """Make the meshes of "fsdp", each in a group of its own."""
    kind = place.device.type
    own = dist.get_default_backend_for_device(kind)
    both = own if kind == "cpu" else f"{kind}:{own},cpu:gloo"
    bound = {} if kind == "cpu" else {"device_id": place.device}
    expected, refutes = "cuda:nccl,cpu:gloo, twice", "no `replicate=` here"
    found = backends_of(both, kind, "replicate", "shard", **bound)
    yield Finding("HSDP, of a group bound to its GPU", found, expected, refutes)
    found = backends_of(both, kind, "replicate", "shard")
    yield Finding("HSDP, of a group that is not bound", found, expected, refutes)
    found, expected = backends_of("gloo", kind, "shard"), "cpu:gloo,cuda:gloo"
    yield Finding("FSDP, of a gloo group", found, expected, "no fsdp for two ranks on one GPU")


def backends_of(backend: str, kind: str, *names: str, **options: Any) -> str:
    """Return the backends of the groups of a mesh of one rank, or why there is none."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        mesh = init_device_mesh(kind, (1,) * len(names), mesh_dim_names=names)
        for name in names:
            dist.all_reduce(torch.ones(4, device=kind), group=mesh.get_group(name))
        return "; ".join(dist.get_backend_config(mesh.get_group(name)) for name in names)
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    finally:
        dist.destroy_process_group()


def probe(place: Place) -> Findings:
    """Change the flags that the record of "exact" must see."""
    pardata.seed_everything(0, deterministic=True)
    records: list[dict[str, object]] = []
    first, second = (timed(lambda: records.append(numerics_record(place.device))) for _ in range(2))
    found = f"{first:.2f}, {second:.4f}, {records[0] == records[1]}"
    yield Finding("s, s again, equal", found, "< 3, < 0.02, True", "exact cannot resume")
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags = [(matmul, "allow_tf32"), (cudnn, "allow_tf32"), (cudnn, "enabled")]
    flags += [(matmul, f"allow_{kind}_reduced_precision_reduction") for kind in ("bf16", "fp16")]
    for where, name in flags:
        value, before = getattr(where, name), numerics_record(place.device)
        setattr(where, name, not value)
        sees = numerics_record(place.device) != before
        setattr(where, name, value)
        what = f"sees {'cudnn' if where is cudnn else 'matmul'}.{name} = {not value}"
        yield Finding(what, sees, "True", "ranks may differ unseen")


def operations(place: Place) -> Findings:
    """Differentiate each operation several times, under the same seed."""
    pardata.seed_everything(0, deterministic=True)
    with place.device:
        for name, case in cases(is_full=place.is_full).items():
            waits = "the host waits" if name.startswith("LSTM") else "no host wait"
            expected = "raises" if name in RAISES else f"equal, {waits}"
            refutes = "DIFFERS: exact on GPUs; a wait: no step waits"
            yield Finding(name, outcome(case, place), expected, refutes)


def outcome(case: Case, place: Place) -> str:
    """Return whether several runs of an operation give the same bits."""

    def run() -> list[Tensor]:
        with fork_torch_rng(7):
            return differentiated(case)

    try:
        first, *others = [run() for _ in range(6 if place.is_full else 2)]
        same = all(all(map(torch.equal, first, other)) for other in others)
        return f"{'equal' if same else 'DIFFERS'}, {host_waits(run, place)}"
    except (RuntimeError, NotImplementedError) as error:
        return f"raises {first_line(error)}"


LOOP, EXACT = "README's loop, one GPU", "exact, one GPU"  # targets
ENDS = {
    "an error of Python, NCCL at work": "[1, 1], [True, True]",
    "a device-side assert, NCCL at work": "[1, -6], [-, False]: the watchdog of NCCL is first",
    "a device-side assert in backward": "[1, -6], [True, True]",
}


def as_rank(name: str, place: Place, rank: int, port: int, path: str) -> None:
    """Be one of two ranks on a device, over gloo, of which rank 1 fails; write errors to a file."""
    with Path(path).open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"
    os.environ.update(zip(names, map(str, (rank, rank, 2, 2, port, "127.0.0.1")), strict=True))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    device, (by_python, by_assert, in_backward), fails = place.device, ENDS, rank == 1
    with pardata.init(device=device, backend="gloo", timeout=20):
        backend = dist.get_default_backend_for_device(device)
        own = [dist.new_group([each], backend=backend) for each in range(2)][rank]
        rows = torch.tensor([3, 2**30 if fails else 4], device=device)
        numbers = torch.ones(2**26 if place.is_full else 8, device=device)
        for _ in range(1 if name == in_backward else 50):
            dist.all_reduce(numbers, group=own, async_op=True)
        if name == by_python and fails:
            raise ValueError("mine")
        if name == by_assert:
            numbers[rows].sum()
            time.sleep(0.3)
        net = nn.Sequential(nn.Embedding(9, 4), nn.BatchNorm1d(4))
        model = pardata.wrap_model(net, "ddp")
        pardata.backward(model, lambda m, batch: m(batch).square().mean(), rows).item()


def ends(place: Place) -> Findings:
    """Start two ranks for each error, one pair after the other, and see how they end."""
    for name, expected in ENDS.items():
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryDirectory() as folder:
            paths = [f"{folder}/{rank}" for rank in range(2)]
            given = [(name, place, rank, store.port, path) for rank, path in enumerate(paths)]
            ranks = [started(as_rank, *each) for each in given]
            for rank, seconds in zip(ranks, (26, 5), strict=True):
                rank.join(seconds)
                rank.kill()
                rank.join()
            marks = zip(paths, ("rank 1 of 2 failed first: ", "[1/2] failed: "), strict=True)
            named_by = [mark in Path(path).read_text() for path, mark in marks]
        found = f"{[rank.exitcode for rank in ranks]}, {named_by}"
        yield Finding(f"exit codes, rank 1 named: {name}", found, expected, "-9: a job hangs too")


def graphs(place: Place) -> Findings:
    """Train a net, and its copy that is compiled to CUDA graphs, with four microbatches."""
    is_cuda = place.is_full and place.device.type == "cuda"
    how: dict[str, Any] = {"mode": "reduce-overhead"} if is_cuda else {"backend": "eager"}
    net = nets(is_full=False)["small MLP"][0]()
    compiled = copy.deepcopy(net)
    models = [pardata.wrap_model(net, "ddp")]
    models.append(pardata.wrap_model(torch.compile(compiled, dynamic=False, **how), "ddp"))
    try:
        for batch in ready((64,), 32, 6, 8):
            for model in models:
                model.zero_grad()
                pardata.backward(model, mean_loss, batch)
        pairs = zip(net.parameters(), compiled.parameters(), strict=True)
        apart = max((one.grad - other.grad).abs().max().item() for one, other in pairs)
        found = f"differ by {apart:.1e}"
    except RuntimeError as error:
        found = first_line(error)
    expected = "an error: overwritten by a subsequent run; or < 1e-5"
    yield Finding("gradients under reduce-overhead", found, expected, "gradients are overwritten")


def lstm(place: Place) -> Findings:
    """Train a recurrent net with dropout, by hand and by backward."""
    net = nn.LSTM(64, 64, 2, dropout=0.2, batch_first=True)
    model = pardata.wrap_model(net, "none")
    batch = torch.randn(32, 16, 64, device=place.device)

    def loss_fn(net: nn.Module, batch: Tensor) -> Tensor:
        return cast("Tensor", net(batch)[0].square().mean())

    loss_fn(model, batch).backward()  # cuDNN begins
    by_hand = host_waits(lambda: loss_fn(model, batch).backward(), place)
    yield Finding("a step by hand", by_hand, "no host wait", "the wait is not that of seeding")
    ours = host_waits(lambda: pardata.backward(model, loss_fn, batch), place)
    yield Finding("a step of backward", ours, "the host waits", "howto-gpus.md names a wait")


def compared(
    blocks: dict[str, Callable[[], object]], steps: int, place: Place, expected: dict[str, str]
) -> Findings:
    """Measure and count a step of each contender, whose ratios are to the first."""
    calls = {name: partial(timed, block) for name, block in blocks.items()}
    alternate(calls, int(place.is_full))  # DDP arranges its buckets after the first step
    times = alternate(calls, place.rounds)
    theirs = next(iter(times.values()))
    for name, ours in times.items():
        ratio = median(map(truediv, ours, theirs))
        found = f"{1e3 * median(ours) / steps:.3g} ms, {ratio:.3f}; {counted(blocks[name], steps)}"
        yield Finding(name, found, expected.get(name, ""), "a wait: no step waits")


def exact(place: Place) -> Findings:
    """Measure "exact" over "ddp" with the same microbatches."""
    pardata.seed_everything(0, deterministic=True)

    def run(block: Block, batches: list[Any], *, deterministic: bool) -> None:
        """Let PyTorch and cuDNN choose deterministic kernels only, or any, as "ddp" does."""
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.deterministic = deterministic
        block(batches)

    for name in ("ResNet-18", "transformer"):
        net, shape, batch = nets(is_full=place.is_full)[name]
        batches = ready(shape, batch, 8 if place.is_full else 1, batch // 4)
        ddp, ours = (partial(run, readme(net(), strategy=s), batches) for s in ("ddp", "exact"))
        blocks: dict[str, Callable[[], object]] = {
            f"{name}: ddp": partial(ddp, deterministic=False),
            f"{name}: ddp, deterministic": partial(ddp, deterministic=True),
            f"{name}: exact": partial(ours, deterministic=True),
        }
        expected = {f"{name}: exact": f"{TARGETS[EXACT]} (ResNet-18: 1.53, 1.18), 0 waits"}
        yield from compared(blocks, len(batches), place, expected)


def two_ranks(place: Place) -> Findings:
    """Measure the README's loop in a group of one, and doing what it does for a second rank."""
    prepare = DistributedStep._prepare  # noqa: SLF001  # a group of two needs two GPUs

    def prepare_for_two(step: DistributedStep) -> None:
        prepare(step)
        step.size = 2

    def run_for_two(block: Block, batches: list[Any]) -> None:
        # The one rank's hashes are not those of two.
        match = patch.object(_step_metrics, "fingerprints_match", lambda _: True)
        with match, patch.object(DistributedStep, "_prepare", prepare_for_two):
            block(batches)

    measured = {"small MLP": "(1.20; 2.6)", "ResNet-18": "(1.13; 1.16)", "transformer": "(0.99)"}
    for name, (net, shape, batch) in nets(is_full=place.is_full).items():
        batches = ready(shape, batch, 20 if place.is_full else 1, None)
        blocks: dict[str, Callable[[], object]] = {
            f"{name}: DDP by hand": partial(by_hand(net()), batches),
            f"{name}: README's loop": partial(readme(net()), batches),
            f"{name}: README's loop, for two": partial(run_for_two, readme(net()), batches),
        }
        expected = dict.fromkeys(list(blocks)[1:], f"{TARGETS[LOOP]} {measured[name]}, 0 waits")
        yield from compared(blocks, len(batches), place, expected)


def seeding(place: Place) -> Findings:
    """Seed the generators of PyTorch, as each microbatch does."""
    count = 3000 if place.is_full else 30

    def seed(times: int) -> None:
        for _ in range(times):
            with fork_torch_rng(5):
                pass

    seed(1)
    found = f"{1e6 * timed(lambda: seed(count)) / count:.1f}"
    yield Finding("us of a microbatch, of all visible GPUs", found, "< 10 (6.6)", "a slow step")


def prefetch(place: Place) -> Findings:
    """Let the host run ahead of steps that take long, and look how many batches are in memory."""
    for count, waits, expected in (
        (0, False, "2"),
        (1, False, "3"),
        (1, True, "3"),
        (3, False, "5"),
    ):
        what = f"batches in memory, prefetch={count}{', synchronised' if waits else ''}"
        found = f"{most_in_memory(place, count, waits=waits):.1f}"
        yield Finding(what, found, expected, "more: a batch for each step ahead")


def most_in_memory(place: Place, count: int, *, waits: bool) -> float:
    """Return how many batches the memory has room for that an epoch has reserved."""
    size, width = (2**21, 6144) if place.is_full else (2**10, 8)
    loader = pardata.make_loader(
        TensorDataset(torch.zeros(64, size)), 8, prefetch=count, seed=0, num_workers=0
    )
    factor = torch.eye(width, device=place.device)
    product = factor @ factor
    reserved = getattr(place.of_kind, "memory_reserved", lambda: 0)
    getattr(place.of_kind, "empty_cache", synchronize)()
    before = reserved()
    for (batch,) in loader:
        for _ in range(16):  # some 150 ms
            torch.mm(factor, factor, out=product)
        batch.sum()
        if waits:
            synchronize()
    return float(reserved() - before) / (8 * 4 * size)


def saves(place: Place) -> Findings:
    """Save asynchronously, three times."""
    width, depth = (2100, 60) if place.is_full else (64, 3)
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    model = pardata.wrap_model(net, "none")
    pinned = getattr(place.of_kind, "host_memory_stats", dict)
    synchronize()
    with tempfile.TemporaryDirectory() as folder:
        saver = pardata.Checkpointer(folder, asynchronous=True, keep=1)
        for number, expected in enumerate(("0.63 s; 1.9", "0.02 s; 1.9", "0.02 s; 1.9")):
            start = time.perf_counter()
            saver.save(number, model=model)
            seconds = time.perf_counter() - start
            saver.wait()
            held = pinned().get("allocated_bytes.current", 0) / (4 * depth * width**2)
            what = f"save {number} stops the loop; pinned memory over the model's"
            refutes = "a later save that takes long: memory is pinned again"
            yield Finding(what, f"{seconds:.3f} s; {held:.1f}", expected, refutes)


ALONE = meshes, ends  # they make their own groups
WITH_GROUP = environment, probe, operations, graphs, lstm, exact, two_ranks
CHECKS = {check.__name__: check for check in (*ALONE, *WITH_GROUP, seeding, prefetch, saves)}


def send(name: str, place: Place, pipe: Connection) -> None:
    """Run a check in this process, and send what it finds as soon as it does."""
    with nullcontext() if CHECKS[name] in ALONE else pardata.init(device=place.device):
        for finding in CHECKS[name](place):
            pipe.send(replace(finding, check=name))


def started(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a process that has imported what takes long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pardata", "torchvision.models"])
    process = context.Process(target=target, args=args)
    process.start()
    return process


def run(name: str, place: Place, seconds: float) -> Findings:
    """Run a check in a process of its own, for so long at most."""
    pipe, there = multiprocessing.Pipe(duplex=False)
    start = time.monotonic()
    process = started(send, name, place, there)
    there.close()
    with suppress(EOFError):
        while pipe.poll(max(0.0, start + seconds - time.monotonic())):
            yield pipe.recv()
    process.join(timeout=5)
    process.kill()
    process.join()
    took = f"{time.monotonic() - start:.1f}, {process.exitcode}"
    yield Finding("seconds, exit code", took, "code 0", "-9: it hangs, or time is over", name)


def main() -> None:
    """Run each check, and print its lines of the table as they come."""
    made = parser(__doc__, 3, "times that contenders take turns")
    made.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS), help="(all)")
    made.add_argument("--device", help="(default: the accelerator that is here)")
    made.add_argument("--dry", action="store_true", help="at the smallest size, as on a CPU")
    args = made.parse_args()
    here = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(args.device or here or "cpu")
    is_full = device.type != "cpu" and not args.dry
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, 0)
    place = Place(device, is_full, args.rounds if is_full else 1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once
    report, end = Report(__file__, args.save), time.monotonic() + ALL_SECONDS
    report.tables["checks"] = findings = list[Finding]()
    print(f"device: {device}{'' if is_full else ': a dry run'}\n")
    print("| check | what | found | expected | another figure refutes |\n|" + " --- |" * 5)
    for name in args.checks:
        for finding in run(name, place, min(SECONDS, end - time.monotonic())):
            findings.append(finding)
            cells = finding.check, finding.what, finding.found, finding.expected, finding.refutes
            print(f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |", flush=True)
    report.save()


if __name__ == "__main__":
    main()
