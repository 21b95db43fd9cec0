"""Where a loader's steps come from: a data set that has indices, or a stream; read here or not."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from pardata.data._order import Order, Requests
from pardata.data._position import Position
from pardata.data._reader import Reader
from pardata.data._request import Fetched
from pardata.data._stream import Stream, alike, not_of_this_stream
from pardata.data._stream_end import together
from pardata.ranks._world import World
from pardata.seeds._mix import mix


@dataclass(frozen=True)
class WorkerOptions:
    """What a ``DataLoader`` needs to know beside what it reads."""

    of_workers: dict[str, Any]
    pin_memory: bool
    seed: int
    rank: int

    @property
    def workers(self) -> int:
        """How many of them there are."""
        number: int = self.of_workers["num_workers"]
        return number

    def loader(self, read: Any, sampler: Any = None) -> DataLoader[Fetched] | None:
        """Return what reads for us; None where we read ourselves.

        Without workers ``DataLoader`` does the same, and takes 90 microseconds a batch for it.
        """
        if not (self.workers or self.pin_memory):
            return None
        return DataLoader(
            read,
            batch_size=None,  # what is read of a step is a batch already
            sampler=sampler,
            collate_fn=_as_it_is,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),
            **self.of_workers,
        )

    def begun(self, loader: DataLoader[Fetched], epoch: int) -> Iterator[Fetched]:
        """Return what `loader` reads of this epoch; its workers begin at once."""
        # From here it draws its workers' seed, and so leaves the user's generator be.
        loader.generator.manual_seed(mix(self.seed, epoch, self.rank))
        return iter(loader)


class Source(Protocol):
    """Yields what is read of the steps of an epoch."""

    order: Order | None
    options: WorkerOptions

    def steps(self, start: Position) -> Iterator[Fetched]:
        """Yield the steps after `start`."""
        ...


class Indexed:
    """The steps of a data set that has indices."""

    def __init__(self, reader: Reader, requests: Requests, options: WorkerOptions) -> None:
        self.order: Order | None = requests.order
        self.options = options
        self._reader = reader
        self._requests = requests
        self._loader = options.loader(reader, requests)

    def steps(self, start: Position) -> Iterator[Fetched]:
        """Yield the steps after `start`. Collective where the order is a sampler's."""
        self._requests.start_at(*start)
        if self._loader is None:
            return map(self._reader.__getitem__, self._requests)
        return self.options.begun(self._loader, start.epoch)


class Streamed:
    """The steps of a stream: they end when all ranks have come to the end of theirs."""

    order: Order | None = None

    def __init__(self, stream: Stream, options: WorkerOptions, ranks: World | None) -> None:
        self.options = options
        self._stream = stream
        self._ranks = ranks
        self._loader = options.loader(stream)

    def steps(self, start: Position) -> Iterator[Fetched]:
        """Yield the steps after `start`. Collective, at each step, where there are ranks."""
        stream, batch_size = self._stream, self._stream.plan.batch_size
        first = -(-start.delivered // batch_size)
        # Of streams that differ only reading again tells which worker delivered how much of its.
        again = first if stream.is_sharded else 0
        stream.start_at(start.epoch, 0 if again else start.delivered)
        read = self._loader
        fetched = iter(stream) if read is None else self.options.begun(read, start.epoch)
        if not stream.is_sharded:
            fetched = alike(fetched, first)
        if self._ranks is not None:
            fetched = together(
                fetched,
                self._ranks,
                sharded=stream.is_sharded,
                drop_last=stream.plan.drop_last,
            )
        return _after(fetched, again, batch_size) if again else fetched


def _after(fetched: Iterator[Fetched], again: int, batch_size: int) -> Iterator[Fetched]:
    """Yield what comes after the first `again` steps, which have been delivered."""
    for count in range(again):
        if next(fetched, None) is None:  # on every rank: they end together
            why = f"on some rank it ended after {count} of {again} steps"
            raise not_of_this_stream(again * batch_size, why)
    yield from fetched


def _as_it_is(fetched: Any) -> Any:
    return fetched
