"""Where a loader's steps come from: a data set that has indices, or a stream; read here or not."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
class Workers:
    """The ``DataLoader`` that reads for us, and the seed of its workers."""

    loader: DataLoader[Fetched]
    seed: int
    rank: int

    def begun(self, epoch: int) -> Iterator[Fetched]:
        """Return what they read of this epoch; they begin at once."""
        # From here it draws its workers' seed, and so leaves the user's generator be.
        self.loader.generator.manual_seed(mix(self.seed, epoch, self.rank))
        return iter(self.loader)


@dataclass(frozen=True)
class Indexed:
    """The steps of a data set that has indices; without `workers`, they are read here."""

    reader: Reader
    requests: Requests
    workers: Workers | None

    @property
    def order(self) -> Order | None:
        """In which order an epoch goes through the data set."""
        return self.requests.order

    def steps(self, start: Position) -> Iterator[Fetched]:
        """Yield the steps after `start`. Collective where the order is a sampler's."""
        self.requests.start_at(*start)
        if self.workers is None:
            return map(self.reader.__getitem__, self.requests)
        return self.workers.begun(start.epoch)


@dataclass(frozen=True)
class Streamed:
    """The steps of a stream: they end when all `ranks`, if there are others, are at their end."""

    stream: Stream
    workers: Workers | None
    ranks: World | None
    order: Order | None = None

    def steps(self, start: Position) -> Iterator[Fetched]:
        """Yield the steps after `start`. Collective, at each step, where there are ranks."""
        stream, plan = self.stream, self.stream.plan
        first = -(-start.delivered // plan.batch_size)
        # Of streams that differ only reading again tells which worker delivered how much of its.
        again = first if stream.is_sharded else 0
        stream.start_at(start.epoch, 0 if again else start.delivered)
        fetched = iter(stream) if self.workers is None else self.workers.begun(start.epoch)
        if not stream.is_sharded:
            fetched = alike(fetched, first)
        if self.ranks is not None:
            sharded, drop_last = stream.is_sharded, plan.drop_last
            fetched = together(fetched, self.ranks, sharded=sharded, drop_last=drop_last)
        return _after(fetched, again, plan.batch_size) if again else fetched


def _after(fetched: Iterator[Fetched], again: int, batch_size: int) -> Iterator[Fetched]:
    """Yield what comes after the first `again` steps, which have been delivered."""
    for count in range(again):
        if next(fetched, None) is None:  # on every rank: they end together
            why = f"on some rank it ended after {count} of {again} steps"
            raise not_of_this_stream(again * batch_size, why)
    yield from fetched


def as_it_is(fetched: Any) -> Any:
    """Return what is a batch already: in place of a ``collate_fn``."""
    return fetched
