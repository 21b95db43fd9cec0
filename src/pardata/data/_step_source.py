"""The source of fetched steps: this process, or the workers of a DataLoader."""

import os
from collections.abc import Callable, Iterator
from multiprocessing import util
from multiprocessing.context import BaseContext
from typing import Any, TypedDict

import torch
from torch.utils.data import DataLoader

from pardata._validation import check_int
from pardata.data._batched_read import batch_reader, cpu_default_device, outline
from pardata.data._loader_state import Position
from pardata.data._worker_init import start_workers
from pardata.environment._device import has_streams
from pardata.environment._world import World, cpus_per_rank
from pardata.rng._seeds import mix
from pardata.store._rank_errors import RemoteError

_LONGEST_SOCKET = 107  # characters of `sun_path` in Linux's unix(7), without the final zero


class DataLoaderOptions(TypedDict, total=False):
    """The options that `make_loader` passes to ``DataLoader``."""

    pin_memory: bool | None
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: BaseContext | str | None
    prefetch_factor: int | None
    persistent_workers: bool | None


def resolve_num_workers(num_workers: Any, dataset: Any, world: World) -> int:
    """Return the number of workers of this rank; "auto" depends on the dataset and the CPU cores.

    Raises:
        TypeError, ValueError: the number is no integer or negative, or workers could not send
            tensors.
    """
    if num_workers == "auto":
        num_workers = 0 if batch_reader(dataset) else min(8, cpus_per_rank(world) - 1)
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
        raise ValueError(
            f"`timeout` must be 0 without workers, because it waits for their batches, "
            f"but is {options['timeout']!r}: leave it out, or pass `num_workers`"
        )
    pin_memory = options.pop("pin_memory", has_streams(device))
    # DataLoader cannot pin a tensor on a GPU, which a dataset in this process may return.
    ours = pin_memory and number == 0 and torch.accelerator.is_available()
    defaults = {"num_workers": number, "persistent_workers": number > 0}
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
        raise ValueError(
            f"the temporary directory must have a name of at most {longest} characters, for its "
            f"sockets, but is {directory!r}: set TMPDIR to a shorter one, or pass num_workers=0"
        )


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
        self._outline: list[Any] = outline(reader.dataset)
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
                f"`dataset` must keep the {had} samples that it had when its loader was made, but "
                f"has {length}: make a new loader, or pass a `sampler`, whose length may change"
            )
        self.requests.seek(start)
        self.digest = self.requests.epoch.digest
        return self._start_epoch(start.epoch, lambda: map(self.reader.__getitem__, self.requests))

    def _start_epoch(self, epoch: int, read: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Return the steps of this epoch: from workers, which start at once, else from `read`."""
        if (outline_now := outline(self.reader.dataset)) != self._outline:
            self._outline = outline_now  # persistent workers have copies of the old dataset
            if self.requests is not None:
                self.reader.find_batch_reader()
            self.renew_workers()
        if self.workers is None:
            return read()
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
