"""The loader: epochs that advance by themselves and can be left and resumed at any step."""

import inspect
import time
import weakref
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset, IterableDataset

from pardata.collective._reduction import all_gather
from pardata.data._batch import emptied
from pardata.data._clock import Clock
from pardata.data._microbatches import Microbatches
from pardata.data._order import Order
from pardata.data._placement import Placement
from pardata.data._position import Identity, Position
from pardata.data._reader import Fetched
from pardata.data._stream import alike, not_of_this_stream
from pardata.data._stream_end import together
from pardata.data._whole_batches import is_read_whole
from pardata.ranks._logger import get_logger
from pardata.ranks._world import World
from pardata.seeds._mix import mix

_log = get_logger(__name__)

_LONG_SHARE = 0.3  # of an epoch
_LONG = 1.0  # seconds: below, nobody waits


class Source(Protocol):
    """What the `DataLoader` inside draws from, and where that is told where to begin."""

    def start_at(self, epoch: int, delivered: int) -> None: ...


@dataclass(frozen=True)
class Setting:
    """What `make_loader` decided, for a `Loader` to follow."""

    here: World
    identity: Identity
    source: Source
    steps: int | None  # of an epoch; None where only its end tells
    order: Order | None  # None for a stream
    sharded: bool
    placement: Placement


class Loader:
    """This rank's batches, epoch after epoch; made by `make_loader`.

    Each ``iter()`` runs the next epoch, also after a ``break`` or an error. Only one epoch runs at
    a time: beginning the next ends the one before. Saves and resumes as PyTorch's ``Stateful``.

    Attributes:
        dataset: as given.
        batch_size: samples of a step, over all ranks.
    """

    def __init__(
        self, loader: DataLoader[Fetched], dataset: Dataset[Any], setting: Setting
    ) -> None:
        self.dataset = dataset
        self.batch_size: int = setting.identity.batch_size
        self._loader = loader
        self._setting = setting
        self._next = Position(0, 0)  # where the next iter() begins
        self._now = Position(0, 0)  # what has been delivered
        self._state = self._now
        self._run: weakref.ref[Generator[Any, None, None]] | None = None
        self._clock = Clock()
        self._has_spoken = False

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch, the same on every rank."""
        if self._setting.steps is None:
            msg = (
                f"the length of a loader must be that of its data set, but "
                f"{type(self.dataset).__name__} has none: give it a __len__, or count the batches"
            )
            raise TypeError(msg)
        return self._setting.steps

    @property
    def epoch(self) -> int:
        """The epoch in progress, else the one that the next ``iter()`` will run."""
        return self._now.epoch if self._is_running() else self._next.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` run this epoch. Not needed: epochs advance by themselves.

        The rest of the epoch that was loaded stays its rest.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            msg = f"`epoch` must be an integer that is not negative, but is {epoch!r}"
            raise ValueError(msg)
        if epoch != self._next.epoch:
            self._next = Position(epoch, 0)
        if not self._is_running():
            self._state = self._next

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is, as a few numbers that are the same on every rank.

        A batch counts as delivered once the loop has it: in the body of step k that step counts,
        and so it does after a ``break`` there. What was read ahead does not. Not collective.
        """
        return self._setting.identity.state(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` go on where `state` was taken, at any world size and at once.

        It yields the rest of that epoch: the samples not yet delivered, in the same global
        batches. ``len()`` stays that of a whole epoch. Not collective. An ``IterableDataset`` is
        read again up to there, and where it ends before, that ``iter()`` raises a ValueError.

        Raises:
            ValueError: for the state of another data set, seed, batch size or order, naming it,
                and for what is no state of a loader.
        """
        is_stream = self._setting.order is None
        self._next = self._setting.identity.position(state, is_stream=is_stream)
        self._now = self._state = self._next
        if is_stream and self._next.delivered:
            _log.info("reads %d samples again, to go on after them", self._next.delivered)

    def stats(self, *, reduce: bool = False) -> dict[str, float]:
        """Return how this rank's time was spent since the epoch in progress, or the last, began.

        ``seconds`` in all; ``wait_seconds`` and ``wait_share`` of it waiting for data; ``samples``
        delivered over all ranks, and ``samples_per_second``. The rest of the time is the loop's.

        Args:
            reduce: return the stats of the rank that waited longest; collective then.
        """
        own = self._clock.stats()
        if not reduce:
            return own
        return max(all_gather(own), key=lambda stats: stats["wait_seconds"])

    def fingerprint(self) -> str:
        """Return a hash of the samples delivered in the epoch in progress, or the last.

        Of their indices, in the order of the epoch: the same on every rank, at every world size,
        and after resuming. Not collective, save with a `sampler`; takes 0.3 seconds for a million
        samples.

        Raises:
            TypeError: for an ``IterableDataset``, whose samples have no indices.
        """
        if self._setting.order is None:
            msg = (
                f"the samples must have indices to be told apart, but those of "
                f"{type(self.dataset).__name__}, an IterableDataset, have none: hash what you get"
            )
            raise TypeError(msg)
        return self._setting.order.fingerprint(self._now.epoch, self._now.delivered)

    def __iter__(self) -> Iterator[Any]:
        """Run the next epoch, or the rest of the one that was loaded.

        Collective only where a `sampler` was given, or an ``IterableDataset``.
        """
        start, setting = self._next, self._setting
        self._now = self._state = start
        self._next = Position(start.epoch + 1, 0)
        self._run = None
        self._clock = clock = Clock()
        step = -(-start.delivered // self.batch_size)
        # Of streams that differ only reading again tells which worker delivered how much of its.
        again = step if setting.sharded else 0
        setting.source.start_at(start.epoch, 0 if again else start.delivered)
        fetched = self._in_step(self._fetched(start.epoch), step)
        clock.add(clock.seconds(), 0)  # for the order, and workers that start
        run = self._batches(self._placed(fetched, again), clock, start)
        self._run = weakref.ref(run)
        return run

    def _fetched(self, epoch: int) -> Iterator[Fetched]:
        loader, read = self._loader, self._loader.dataset
        if loader.num_workers or loader.pin_memory:
            # From here it draws its workers' seed, and so leaves the user's generator be.
            loader.generator.manual_seed(
                mix(self._setting.identity.seed, epoch, self._setting.here.rank)
            )
            return iter(loader)
        # What DataLoader does without workers, save for the 90 microseconds a batch it does it in.
        return (
            iter(read)
            if isinstance(read, IterableDataset)
            else map(read.__getitem__, loader.sampler)
        )

    def _in_step(self, fetched: Iterator[Fetched], first: int) -> Iterator[Fetched | None]:
        setting = self._setting
        if setting.order is not None:
            return fetched
        if not setting.sharded:
            fetched = alike(fetched, first)
        if setting.here.size == 1:
            return fetched
        return together(
            fetched, setting.here, sharded=setting.sharded, drop_last=setting.identity.drop_last
        )

    def _batches(
        self, placed: Iterator[tuple[int, Any]], clock: Clock, now: Position
    ) -> Generator[Any, None, None]:
        steps = self._setting.placement.ahead(placed)
        try:
            while True:
                if clock is not self._clock:
                    msg = (
                        "a loader must run one epoch at a time, but a newer iter() has begun: "
                        "make another loader for the loop inside"
                    )
                    raise RuntimeError(msg)
                asked = time.perf_counter()
                count, batch = next(steps, (0, None))
                clock.add(time.perf_counter() - asked, count)
                if not count:
                    break
                self._now = self._state = now = now.after(count)
                yield batch
                del batch  # its memory may serve for the next one, and is still in the cache
            self._state = self._next
            self._speak_of_waiting(clock)
        finally:
            clock.stop()

    def _placed(self, fetched: Iterator[Fetched | None], again: int) -> Iterator[tuple[int, Any]]:
        """Yield each step's batch, on its device, and how many samples the step has.

        The first `again` steps have been delivered, and are only read.
        """
        last: Fetched | None = None
        count = -1
        for count, own in enumerate(fetched):
            # Where only others have samples left, this rank's batch takes the shape of its last.
            step = own if own is not None else last and last._replace(rows=0)
            assert step is not None  # noqa: S101  # `together` sees to it
            last = step if self._setting.sharded else None
            if count >= again:
                yield self._samples_of(step), self._shaped(step)
            del own, step  # nothing is kept that the next batch might take the place of
        if count + 1 < again:  # on every rank: they end together
            why = f"on some rank it ended after {count + 1} of {again} steps"
            raise not_of_this_stream(again * self.batch_size, why)

    def _samples_of(self, step: Fetched) -> int:
        # A rank that reads a stream of its own knows only what the steps should have.
        return self.batch_size if self._setting.sharded else sum(step.counts)

    def _shaped(self, step: Fetched) -> Any:
        """Return what the loop gets: microbatches, or one batch, empty if it has no rows."""
        batches = [
            self._setting.placement.place(part, step.epoch, step.step, number)
            for number, part in enumerate(step.parts, step.first)
        ]
        if self._setting.identity.microbatch_size is not None:
            return Microbatches(
                batches if step.rows else (),
                epoch=step.epoch,
                step=step.step,
                first=step.first,
                counts=step.counts,
                seed=self._setting.identity.seed,
                size=self._setting.here.size,
                stand_in=batches[0],
            )
        (batch,) = batches
        if self._samples_of(step) < self._setting.here.size or step.rows == 0:
            # On every rank, so that a batch that cannot be emptied is an error on all of them.
            empty = emptied(batch)
            return batch if step.rows else empty
        return batch

    def _speak_of_waiting(self, clock: Clock) -> None:
        stats = clock.stats()
        if self._has_spoken or not stats["samples"]:
            return  # of none: nothing was left of the epoch that was loaded
        self._has_spoken = True
        if stats["wait_seconds"] < _LONG or stats["wait_share"] < _LONG_SHARE:
            return
        cures = f"more num_workers (now {self._loader.num_workers}) read in parallel"
        if not is_read_whole(self.dataset):
            cures += (
                ", cache_dataset decodes once, and batch_transform does a whole batch at a time"
            )
        _log.warning(
            "the first epoch spent %.0f %% of its %.1f s waiting for data: %s",
            100 * stats["wait_share"],
            stats["seconds"],
            cures,
            ranks=[0],
        )

    def _is_running(self) -> bool:
        # The reference dies with a loop that was left, the frame with one that came to its end.
        run = None if self._run is None else self._run()
        return run is not None and inspect.getgeneratorstate(run) != inspect.GEN_CLOSED
