"""The loader: epochs that advance by themselves, over PyTorch's DataLoader."""

import hashlib
import inspect
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from pardata._agreement import agree
from pardata._batches import emptied, moved
from pardata._sampling import Plan, mix, shuffled
from pardata._seeding import forked_seed
from pardata._store import require_same
from pardata._world import World


@dataclass(frozen=True)
class Order:
    """In which order an epoch goes through the data set."""

    here: World
    length: int
    seed: int
    shuffle: bool
    sampler: Sampler[Any] | None

    def __call__(self, epoch: int) -> Sequence[Any]:
        """Return the index of the sample at each position of this epoch.

        With a sampler this is collective: it may be of the user's making, so the ranks compare.
        """
        if self.sampler is not None:
            return self._drawn(self.sampler, epoch)
        return shuffled(self.length, self.seed, epoch) if self.shuffle else range(self.length)

    def _drawn(self, sampler: Sampler[Any], epoch: int) -> Sequence[Any]:
        def draw() -> dict[str, object]:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            with forked_seed(mix(self.seed, epoch)):
                indices.extend(sampler)
            if len(indices) != self.length:
                msg = (
                    f"`sampler` must yield as many indices as its length, {self.length}, but "
                    f"yielded {len(indices)}"
                )
                raise ValueError(msg)
            return {"the order": hashlib.sha256(repr(indices).encode()).hexdigest()[:16]}

        indices: list[Any] = []
        told = agree(self.here, "iter(loader) with a sampler", draw)
        cure = "Give the sampler no generator of its own, or one seeded alike on every rank."
        require_same("make_loader(sampler=…)", told, cure)
        return indices


class ShareSampler(Sampler[list[Any]]):
    """Yields, for each step of the epoch, the indices that this rank reads."""

    def __init__(self, plan: Plan, order: Order) -> None:
        self.plan = plan
        self.order = order
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[list[Any]]:
        # The order is drawn here, for the epoch of now, and not at the first step.
        order = self.order(self.epoch)
        return (self._part_of(order, step) for step in range(len(self.plan)))

    def _part_of(self, order: Sequence[Any], step: int) -> list[Any]:
        # A rank without samples reads the step's first, whose shape its empty batch takes.
        own = self.plan.share(step) or self.plan.step(step)[:1]
        return list(order[own.start : own.stop])


class Loader:
    """This rank's batches, epoch after epoch; made by `make_loader`.

    Each ``iter()`` runs the next epoch, also after a ``break`` or an error. Only one epoch runs at
    a time: beginning the next ends the one before.

    Attributes:
        dataset: as given.
        batch_size: samples of a step, over all ranks.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        shares: ShareSampler,
        dataset: Dataset[Any],
        device: torch.device | None,
    ) -> None:
        self.dataset = dataset
        self.batch_size: int = shares.plan.batch_size
        self._loader = loader
        self._shares = shares
        self._device = device
        self._next_epoch = 0
        self._run: weakref.ref[Generator[Any, None, None]] | None = None
        self._clock = _Clock()

    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on every rank."""
        return len(self._shares)

    @property
    def epoch(self) -> int:
        """The epoch in progress, else the one that the next ``iter()`` will run."""
        return self._shares.epoch if self._is_running() else self._next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` run this epoch. Not needed: epochs advance by themselves."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            msg = f"`epoch` must be an integer that is not negative, but is {epoch!r}"
            raise ValueError(msg)
        self._next_epoch = epoch

    def stats(self) -> dict[str, float]:
        """Return how this rank's time was spent since the epoch in progress, or the last, began.

        ``seconds`` in all; ``wait_seconds`` and ``wait_share`` of it waiting for data; ``samples``
        delivered over all ranks, and ``samples_per_second``. The rest of the time is the loop's.
        """
        return self._clock.stats()

    def __iter__(self) -> Iterator[Any]:
        """Run the next epoch. Collective only where a `sampler` was given."""
        epoch = self._next_epoch
        self._shares.epoch = epoch
        self._next_epoch = epoch + 1
        self._run = None
        self._clock = clock = _Clock()
        order = self._shares.order
        # DataLoader draws the seed of its workers from here, and so leaves the user's generator be.
        self._loader.generator.manual_seed(mix(order.seed, epoch, order.here.rank))
        batches = iter(self._loader)
        clock.add(clock.seconds(), 0)  # for the order, and workers that start
        run = self._batches(batches, clock)
        self._run = weakref.ref(run)
        return run

    def _batches(self, batches: Iterator[Any], clock: "_Clock") -> Generator[Any, None, None]:
        plan = self._shares.plan
        try:
            for step in range(len(plan)):
                if clock is not self._clock:
                    msg = (
                        "a loader must run one epoch at a time, but a newer iter() has begun: "
                        "make another loader for the loop inside"
                    )
                    raise RuntimeError(msg)
                asked = time.perf_counter()
                batch = self._placed(next(batches), step)
                clock.add(time.perf_counter() - asked, len(plan.step(step)))
                yield batch
        finally:
            clock.stop()

    def _placed(self, batch: Any, step: int) -> Any:
        plan = self._shares.plan
        if plan.leaves_some_empty(step):
            # On every rank, so that a batch that cannot be emptied is an error on all of them.
            empty = emptied(batch)
            batch = batch if plan.share(step) else empty
        return batch if self._device is None else moved(batch, self._device)

    def _is_running(self) -> bool:
        # The reference dies with a loop that was left, the frame with one that came to its end.
        run = None if self._run is None else self._run()
        return run is not None and inspect.getgeneratorstate(run) != inspect.GEN_CLOSED


class _Clock:
    """Two readings of the clock a batch: how long the loop waited, of how long it ran."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._end: float | None = None
        self._waited = 0.0
        self._samples = 0

    def add(self, seconds: float, samples: int) -> None:
        self._waited += seconds
        self._samples += samples

    def stop(self) -> None:
        self._end = time.perf_counter()

    def seconds(self) -> float:
        end = time.perf_counter() if self._end is None else self._end
        return end - self._start

    def stats(self) -> dict[str, float]:
        seconds = max(self.seconds(), 1e-9)
        return {
            "seconds": seconds,
            "wait_seconds": self._waited,
            "wait_share": self._waited / seconds,
            "samples": self._samples,
            "samples_per_second": self._samples / seconds,
        }
