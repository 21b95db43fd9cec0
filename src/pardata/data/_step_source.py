"""The source of fetched steps: this process, or the workers of a DataLoader.

Workers ignore the signals that stop a run, and end with their rank.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
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
    """Raise if the temporary directory's name is too long for the sockets that send tensors.

    A thread of the worker would fail, and ``DataLoader`` wait forever for its batch.
    """
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
        workers: the ``DataLoader`` that reads in workers or pins; None without both.
    """

    def __init__(self, reader: Any, requests: Any, ranks: World, options: dict[str, Any]) -> None:
        self.reader, self.requests = reader, requests
        self._ranks, self._options = ranks, options
        self.digest: str | None = None
        self.workers: DataLoader[Any] | None = None
        self.renew_workers()

    def renew_workers(self) -> None:
        """Let the next epoch start new workers, if there are any."""
        if self._options["num_workers"] or self._options["pin_memory"]:
            # Without workers and pinning, a DataLoader would only add 90 µs to each batch.
            self.workers = DataLoader(
                self.reader,
                batch_size=None,  # a fetched step is a batch already
                sampler=self.requests,
                collate_fn=_identity,
                generator=torch.Generator(),
                **self._options,
            )

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
        if self.workers is None:
            return read()
        check_files(self.workers, self.reader.dataset, self.reader.collation.collate_fn)
        # DataLoader draws the base seed of its workers from this generator, not from the default
        # one.
        self.workers.generator.manual_seed(mix(self.reader.collation.seed, epoch, self._ranks.rank))
        with cpu_default_device():  # DataLoader draws its base seed on the default device
            return map(_or_raise, start_workers(self.workers, self._options.get("worker_init_fn")))


def _or_raise(fetched: Any) -> Any:
    """Return a step that a worker fetched, or raise the error that it returned."""
    if isinstance(fetched, RemoteError):
        raise fetched.to_exception()
    return fetched


def _identity(fetched: Any) -> Any:
    return fetched


def _end_workers(processes: set[BaseProcess], pipe: tuple[Connection, Connection]) -> None:
    """End workers, which ignore SIGTERM, when their iterator is freed or their rank exits.

    At exit, multiprocessing would send SIGTERM and wait. If an error holds the iterator in a cycle,
    the garbage collector closes its queues before the iterator can end the workers.
    """
    if util.is_exiting():
        # DataLoader's handler raises if a worker dies.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in processes:
            process.kill()
    else:
        pipe[1].send_bytes(b"end")  # no worker reads it, so all wake up


def start_workers(loader: DataLoader[Any], init_fn: Callable[[int], None] | None) -> Iterator[Any]:
    """Return ``iter(loader)``, with workers that ignore the signals that stop a run.

    torchrun and SLURM signal all processes of a run. Workers ignore these signals, because the rank
    may still need batches, and end when their rank ends. If the rank is killed, a worker in C code
    that holds the GIL ends after that code.
    """
    if not loader.num_workers:
        return iter(loader)
    numbers = [int(n) for n in signal.Signals if is_stop_signal(n)]
    pipe = multiprocessing.Pipe(duplex=False)
    loader.worker_init_fn = partial(worker_init, init_fn, numbers, pipe[0])
    method = start_method(loader)
    if method == "forkserver":
        # The server inherits the blocked signals; `_fork_server` unblocks them in its children.
        multiprocessing.set_forkserver_preload(["__main__", "pardata.data._fork_server"])
    others, steps = {*multiprocessing.active_children()}, None
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until the worker has its handlers
    try:
        if method != "fork":
            resource_tracker.ensure_running()  # up to Python 3.13 it unblocks SIGTERM
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        steps = iter(loader)
        return steps
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if new := {*multiprocessing.active_children()} - others:
            util.Finalize(steps, _end_workers, [new, pipe], exitpriority=0)


def start_method(loader: DataLoader[Any]) -> str:
    """Return the start method of the workers of a loader."""
    return str((loader.multiprocessing_context or multiprocessing).get_start_method())


def _exit_worker() -> None:
    """Exit a spawned worker without finalising its interpreter, as forked workers exit.

    Finalising resets the signal handlers, so that SIGTERM would end the worker. It also ends
    threads in C++, which print "terminate called without an active exception".
    """
    if sys.exc_info()[0] is None:  # otherwise the interpreter prints the error
        flush_output()
        os._exit(0)


def worker_init(
    init_fn: Callable[[int], None] | None, numbers: list[int], reader: Connection, worker: int
) -> None:
    """Initialise a worker: ignore the signals `numbers`, exit with the rank, call `init_fn`.

    The worker also exits when `reader` becomes readable.

    ``get_worker_info().dataset`` becomes the user's dataset in place of the fetcher.
    """
    for number in numbers:
        # Programs that a worker starts would inherit SIG_IGN.
        signal.signal(number, lambda *_: None)
        signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    util.Finalize(None, _exit_worker, exitpriority=_LAST)
    threading.Thread(target=_exit_if_asked, args=[reader], daemon=True).start()
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # it forbids setattr
    if init_fn is not None:
        try:
            init_fn(worker)
        except StopIteration as error:  # DataLoader would take it for the end of the data
            text = f"`worker_init_fn` failed in worker {worker}: StopIteration: {error}"
            raise RuntimeError(text) from error


def _exit_if_asked(reader: Connection) -> None:
    rank: Any = multiprocessing.parent_process()
    wait([rank.sentinel, reader])
    os._exit(0)
