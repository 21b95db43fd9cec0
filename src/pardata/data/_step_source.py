"""The source of fetched steps: this process, or the workers of a DataLoader.

Workers ignore the signals that stop a run, and end with their rank.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import resource_tracker, util
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from threading import Thread, current_thread, main_thread
from typing import Any, TypedDict

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pardata._validation import check_int
from pardata.collectives._stop_signal import is_stop_signal
from pardata.data._batched_read import batch_reader, cpu_default_device
from pardata.data._held_objects import open_files
from pardata.data._loader_state import Position
from pardata.environment._device import has_streams
from pardata.environment._logger import flush_output
from pardata.environment._world import World, cpus_per_rank
from pardata.rng._seeds import mix
from pardata.store._rank_errors import RemoteError

_LONGEST_SOCKET = 107  # characters of `sun_path` in Linux's unix(7), without the final zero
_PATIENCE = 2.0  # seconds
_LAST = -200  # the priority after finalizers of queues and of the temporary folder


class DataLoaderOptions(TypedDict, total=False):
    """The options that `make_loader` passes to ``DataLoader``."""

    pin_memory: bool | None
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: multiprocessing.context.BaseContext | str | None
    prefetch_factor: int | None
    persistent_workers: bool | None


def resolve_num_workers(num_workers: Any, dataset: Any, world: World) -> int:
    """Return the number of workers of this rank; "auto" depends on the dataset and the CPU cores.

    Raises:
        TypeError, ValueError: the number is no integer or negative, or workers could not send
            tensors.
    """
    if num_workers == "auto":
        num_workers = 0 if batch_reader(dataset) else min(8, cpus_per_rank(world.local_size) - 1)
    number = check_int("num_workers", num_workers, least=0, why=" or 'auto'")
    if number:
        _check_they_can_send()
    return number


def worker_options(
    num_workers: Any, given: DataLoaderOptions, dataset: Any, world: World, device: torch.device
) -> tuple[dict[str, Any], bool]:
    """Return the options of the ``DataLoader``, and whether pardata itself pins the batches."""
    number = resolve_num_workers(num_workers, dataset, world)
    options: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
    if number == 0 and num_workers == "auto":
        # DataLoader raises for these without workers, and "auto" may be 0 on some ranks only.
        options = {name: x for name, x in options.items() if name == "pin_memory"}
    elif number == 0 and options.get("timeout"):
        raise ValueError(f"`timeout` must be 0 without workers, but is {options['timeout']!r}")
    pin_memory = options.pop("pin_memory", has_streams(device))
    # DataLoader cannot pin a tensor on a GPU, which a dataset in this process may return.
    ours = pin_memory and number == 0 and torch.accelerator.is_available()
    # A stateful stream has its state in the workers.
    is_stateful = isinstance(dataset, IterableDataset) and hasattr(dataset, "state_dict")
    defaults = {"num_workers": number, "persistent_workers": number > 0 and is_stateful}
    return {**defaults, **options, "pin_memory": pin_memory and not ours}, ours


def _check_they_can_send() -> None:
    """Raise if sockets that send tensors get too long a name: ``DataLoader`` would wait forever."""
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return  # macOS and Windows use no socket
    directory = util.get_temp_dir()
    # The socket's name in multiprocessing.connection.
    longest = _LONGEST_SOCKET - len("/listener-12345678")
    if len(os.fsencode(directory)) > longest:
        raise ValueError(f"TMPDIR must have at most {longest} characters, but is {directory!r}")


def check_files(loader: DataLoader[Any], dataset: Any, collate_fn: Any) -> None:
    """Raise if forked workers of `loader` would share an open file, and so its position."""
    held = (*open_files("dataset", dataset), *open_files("collate_fn", collate_fn))
    for path in held if loader.num_workers and start_method(loader) == "fork" else ():
        raise ValueError(f"`{path}` must be closed when workers fork: open it at the first sample")


class StepSource:
    """Iterates over the fetched steps of an epoch: ``reader[request]`` for each of `requests`.

    Attributes:
        requests: the sampler of requests, None for an iterable dataset.
        digest: a hash of the epoch's order, if a user's sampler or an iterable dataset decides it.
    """

    def __init__(self, reader: Any, requests: Any, ranks: World, options: dict[str, Any]) -> None:
        self.reader, self.requests = reader, requests
        self._ranks, self._options = ranks, options
        self.digest: str | None = None
        self._workers: WorkerSteps | None = None  # those of the epoch before, if they stay

    def steps(self, start: Position) -> Iterator[Any]:
        """Yield the steps after the position `start`. Collective with a user's sampler."""
        length, had = len(self.reader.dataset), self.requests.plan.length
        if length != had and self.requests.sampler is None:
            raise ValueError(
                f"`dataset` must keep its {had} samples, but has {length}: make a new loader for it"
            )
        self.reader.find_batch_reader()  # a Subset may have other indices than before
        self.requests.seek(start)
        self.digest = self.requests.epoch.digest
        return self._start_epoch(start.epoch, lambda: map(self.reader.__getitem__, self.requests))

    def _start_epoch(self, epoch: int, read: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the steps of this epoch: from workers, which start at once, else from `read`."""
        if not (self._options["num_workers"] or self._options["pin_memory"]):
            return read()  # a DataLoader would only add 90 µs to each batch
        steps = self._workers or WorkerSteps(self._data_loader())
        self._workers = steps if self._options["persistent_workers"] else None
        seed = mix(self.reader.collation.seed, epoch, self._ranks.rank)
        steps.begin(seed, self._options.get("worker_init_fn"))
        return steps

    def _data_loader(self) -> DataLoader[Any]:
        loader = DataLoader[Any](
            self.reader,
            batch_size=None,  # a fetched step is a batch already
            sampler=self.requests,
            collate_fn=_identity,
            generator=torch.Generator(),
            **self._options,
        )
        check_files(loader, self.reader.dataset, self.reader.collation.collate_fn)
        return loader


def _identity(fetched: Any) -> Any:
    return fetched


class WorkerSteps(Iterator[Any]):
    """The steps that the workers of a ``DataLoader`` read. The workers end when it is freed."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._held: list[Any] = [loader]  # with its iterator; `_end_workers` frees both

    def begin(self, seed: int, init_fn: Callable[[int], None] | None) -> None:
        """Begin an epoch, in which the workers get base seeds of `seed`; start them if need be."""
        others, pid, loader = {*multiprocessing.active_children()}, os.getpid(), self._held[0]
        # DataLoader draws the base seed from this generator, and on the default device.
        loader.generator.manual_seed(seed)
        try:
            with cpu_default_device():
                self._held[1:] = [start_workers(loader, init_fn)]
        finally:
            if workers := {*multiprocessing.active_children()} - others:
                # Called before torch and multiprocessing, which would wait for the workers.
                at_exit = atexit.register(partial(_kill_workers, pid, workers))
                weakref.finalize(self, _end_workers, pid, self._held, workers, at_exit)

    def __next__(self) -> Any:
        fetched = next(self._held[1])
        if isinstance(fetched, RemoteError):  # raised in a worker
            raise fetched.to_exception()
        return fetched


def _end_workers(
    pid: int, held: list[Any], workers: set[BaseProcess], at_exit: Callable[[], None]
) -> None:
    """Free a ``DataLoader``, and kill those of its workers that do not end in `_PATIENCE`.

    ``DataLoader`` and multiprocessing would send SIGTERM, which workers ignore, and wait.
    """
    handler, is_main = signal.getsignal(signal.SIGCHLD), current_thread() is main_thread()
    if pid != os.getpid() or (callable(handler) and not is_main):
        return  # DataLoader's handler raises if a worker is killed; a thread cannot replace it
    atexit.unregister(at_exit)
    if workers.isdisjoint(multiprocessing.active_children()):
        return
    if is_main:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        killer = Thread(target=_kill_workers, args=[pid, workers, _PATIENCE])
        killer.start()
        held.clear()  # DataLoader asks the workers to end, and waits up to 5 s for each
        killer.join()
    finally:
        if is_main:
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def _kill_workers(pid: int, workers: set[BaseProcess], patience: float = 0.0) -> None:
    """Kill those workers of the process `pid` that do not end in `patience` seconds; at exit 0."""
    if pid == os.getpid():
        if not patience:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        deadline = time.monotonic() + patience
        for process in workers:
            wait([process.sentinel], max(0.0, deadline - time.monotonic()))
            process.kill()


def start_workers(loader: DataLoader[Any], init_fn: Callable[[int], None] | None) -> Iterator[Any]:
    """Return ``iter(loader)``, with workers that ignore the signals that stop a run.

    torchrun and SLURM signal all processes, but the rank may still need batches. Workers end when
    their rank ends; after it is killed, a worker in C code that holds the GIL ends after that code.
    """
    if not loader.num_workers:
        return iter(loader)
    numbers = [int(n) for n in signal.Signals if is_stop_signal(n)]
    loader.worker_init_fn = WorkerInit(init_fn, numbers)
    method = start_method(loader)
    if method == "forkserver":
        # The server inherits the blocked signals; `_fork_server` unblocks them in other children.
        multiprocessing.set_forkserver_preload(["__main__", "pardata.data._fork_server"])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until the worker has its handlers
    try:
        if method != "fork":
            resource_tracker.ensure_running()  # up to Python 3.13 it unblocks SIGTERM
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_method(loader: DataLoader[Any]) -> str:
    """Return the start method of the workers of a loader."""
    return str((loader.multiprocessing_context or multiprocessing).get_start_method())


def _exit_worker() -> None:
    """Exit a spawned worker without finalizing its interpreter, as forked workers exit.

    Finalizing resets the signal handlers, so that SIGTERM would end the worker. It also ends
    threads in C++, which print "terminate called without an active exception".
    """
    if sys.exc_info()[0] is None:  # otherwise the interpreter prints the error
        flush_output()
        os._exit(0)


@dataclass
class WorkerInit:
    """Initializes a worker: ignores the signals `numbers`, exits with the rank, calls `init_fn`.

    ``get_worker_info().dataset`` becomes the user's dataset in place of the fetcher.
    """

    init_fn: Callable[[int], None] | None
    numbers: list[int]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A worker of a fork server unpickles this before `_fork_server` would unblock its signals.
        from pardata.data import _fork_server  # noqa: PLC0415  # it changes processes

        _fork_server.unblocks = False
        vars(self).update(state)

    def __call__(self, worker: int) -> None:
        for number in self.numbers:
            # Programs that a worker starts would inherit SIG_IGN.
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        util.Finalize(None, _exit_worker, exitpriority=_LAST)
        Thread(target=_exit_with_rank, daemon=True).start()
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it forbids setattr
        if self.init_fn is not None:
            try:
                self.init_fn(worker)
            except StopIteration as error:  # DataLoader would take it for the end of the data
                text = f"`worker_init_fn` failed in worker {worker}: StopIteration: {error}"
                raise RuntimeError(text) from error


def _exit_with_rank() -> None:
    rank: Any = multiprocessing.parent_process()
    wait([rank.sentinel])
    os._exit(0)
