"""Reading here or in workers: how many, whether they can hand over, and their seeds."""

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
from pardata.store._remote_error import RemoteError

_LONGEST_SOCKET = 107  # characters: `sun_path` of Linux's unix(7), without its last zero


class DataLoaderOptions(TypedDict, total=False):
    """The options that `make_loader` hands on to ``DataLoader`` as they are."""

    pin_memory: bool | None
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: BaseContext | str | None
    prefetch_factor: int | None
    persistent_workers: bool | None


def resolve_num_workers(num_workers: Any, dataset: Any, world: World) -> int:
    """Return how many workers this rank gets, of which "auto" decides from dataset and cores.

    Raises:
        TypeError, ValueError: for a number that is none or negative, and where workers could not
            hand over a tensor.
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
    """Return the options of the ``DataLoader``, and whether we pin the batches in its place."""
    number = resolve_num_workers(num_workers, dataset, world)
    options: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
    if number == 0 and num_workers == "auto":
        # DataLoader refuses these without workers, and "auto" may find none on some ranks only.
        options = {name: x for name, x in options.items() if name == "pin_memory"}
    elif number == 0 and options.get("timeout"):
        raise ValueError(
            f"`timeout` must be 0 without workers, because it waits for their batches, "
            f"but is {options['timeout']!r}: leave it out, or pass `num_workers`"
        )
    pin_memory = options.pop("pin_memory", has_streams(device))
    # DataLoader refuses a tensor that is on a GPU already, which none that comes from a worker is.
    ours = pin_memory and number == 0 and torch.accelerator.is_available()
    defaults = {"num_workers": number, "persistent_workers": number > 0}
    return {**defaults, **options, "pin_memory": pin_memory and not ours}, ours


def _check_they_can_send() -> None:
    """Raise where a worker could not open the socket by which it hands over a tensor.

    The worker's thread would die of that unseen, and ``DataLoader`` wait for its batch for ever.
    """
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return  # macOS and Windows: no socket
    directory = util.get_temp_dir()
    longest = _LONGEST_SOCKET - len("/listener-12345678")  # as multiprocessing.connection names it
    if len(os.fsencode(directory)) > longest:
        raise ValueError(
            f"the temporary directory must have a name of at most {longest} characters, for its "
            f"sockets, but is {directory!r}: set TMPDIR to a shorter one, or pass num_workers=0"
        )


class StepSource:
    """Where the steps of an epoch come from: `reader`, which is asked for each of `requests`.

    Attributes:
        requests: None for a stream, which is not asked for anything.
        digest: of what tells this epoch from others, where that is not decided here.
        workers: where copies of it read, and what they bring is pinned; None if it reads here.
    """

    def __init__(self, reader: Any, requests: Any, ranks: World, options: dict[str, Any]) -> None:
        self.reader, self.requests = reader, requests
        self._ranks, self._options = ranks, options
        self.digest: str | None = None
        self.workers: DataLoader[Any] | None = None
        self._outline: list[Any] = outline(reader.dataset)
        self.renew_workers()

    def renew_workers(self) -> None:
        """Let the next epoch start workers of its own, if there are any."""
        if self._options["num_workers"] or self._options["pin_memory"]:
            # Without workers or pins, a DataLoader would only add 90 microseconds to each batch.
            self.workers = DataLoader(
                self.reader,
                batch_size=None,  # what is read of a step is a batch already
                sampler=self.requests,
                collate_fn=_identity,
                generator=torch.Generator(),
                **self._options,
            )

    def steps(self, start: Position) -> Iterator[Any]:
        """Yield the steps after those delivered. Collective where the order is a sampler's."""
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
            self._outline = outline_now  # workers that live on have copies of what it was
            if self.requests is not None:
                self.reader.find_batch_reader()
            self.renew_workers()
        if self.workers is None:
            return read()
        # DataLoader draws its workers' seed from this, and leaves the user's generator alone.
        seed = self.reader.collation.seed
        self.workers.generator.manual_seed(mix(seed, epoch, self._ranks.rank))
        with cpu_default_device():  # where DataLoader draws the seed of its workers
            return map(_or_raise, start_workers(self.workers, self._options.get("worker_init_fn")))


def _or_raise(fetched: Any) -> Any:
    """Return what a worker has read, or raise the error that it returned."""
    if isinstance(fetched, RemoteError):
        raise fetched.to_exception()
    return fetched


def _identity(fetched: Any) -> Any:
    return fetched
