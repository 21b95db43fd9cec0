"""Iterable data sets: each sample on one rank and one worker, in the same steps at every size."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from pardata.data._plan import Plan, share
from pardata.data._reader import Fetched, Seeds, StandsForDataset, User, unreadable
from pardata.ranks._world import world
from pardata.seeds._generators import kept_generators, seed_generators
from pardata.seeds._mix import mix


@dataclass(frozen=True)
class Cut:
    """How a stream is cut into steps, and a step into shares."""

    batch_size: int
    drop_last: bool
    microbatch_size: int | None
    rank: int
    size: int
    sharded: bool

    def plan(self, count: int) -> Plan:
        """Return the plan of one step of `count` samples."""
        return Plan(count, self.batch_size, False, self.microbatch_size, self.rank, self.size)


class Stream(StandsForDataset, IterableDataset[Fetched]):
    """An iterable data set as the loader's workers see it: it yields whole steps.

    Unless the data set is `sharded`, every rank and every worker goes through all of it and keeps
    its own part, so that the samples of a step are the same at every size; worker *w* of *n* makes
    the steps *w*, *w* + *n* and so on. A `sharded` one yields, on each rank and worker, samples
    that no other yields: they are batched as they come.
    """

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, seeds: Seeds, cut: Cut
    ) -> None:
        self._collate = collate_fn
        self._seeds = seeds
        self._cut = cut
        self._rank = world().rank  # that of the process, also where nothing is shared out
        # After which sample to begin, also for workers that live on: they have copies of all else.
        self._start = torch.zeros(2, dtype=torch.int64).share_memory_()
        self.dataset = dataset

    def start_at(self, epoch: int, delivered: int) -> None:
        """Let the next ``iter()`` begin after so many samples of this epoch."""
        self._start.copy_(torch.tensor([epoch, delivered]))

    def __iter__(self) -> Iterator[Fetched]:
        epoch, delivered = self._start.tolist()
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        if self._cut.sharded:
            return self._own_steps(epoch, number, workers)
        return self._common_steps(epoch, delivered, number, workers)

    def _common_steps(
        self, epoch: int, delivered: int, number: int, workers: int
    ) -> Iterator[Fetched]:
        cut = self._cut
        samples = _Seeded(self.dataset, self._seeds.seed, epoch, self._rank)
        skipped = samples.skip(delivered)
        if skipped < delivered:
            raise not_of_this_stream(delivered, f"it ended after {skipped}")
        if delivered % cut.batch_size:  # an incomplete batch is the last one
            if samples.take(1):
                why = f"it goes on there, in the middle of a batch of {cut.batch_size}"
                raise not_of_this_stream(delivered, why)
            return
        first = delivered // cut.batch_size
        step, seen = first, ""
        while read := samples.take(cut.batch_size):
            if len(read) < cut.batch_size and cut.drop_last:
                return
            seen = seen or _hash([read[0], read[-1]])
            if (step - first) % workers == number:
                fetched = self._fetched(epoch, step, cut.plan(len(read)), read)
                yield fetched._replace(read=seen)
            step += 1

    def _own_steps(self, epoch: int, number: int, workers: int) -> Iterator[Fetched]:
        # A worker of its own seed, as the data set is to yield other samples in each.
        cut = self._cut
        own = len(share(cut.batch_size, cut.rank, cut.size))
        seed = mix(self._seeds.seed, cut.rank, number)
        samples = _Seeded(self.dataset, seed, epoch, self._rank)
        step = number
        whole = replace(cut, batch_size=own, rank=0, size=1)
        while read := samples.take(own):
            if len(read) < own and cut.drop_last:
                return
            yield self._fetched(epoch, step, whole.plan(len(read)), read)
            step += workers

    def _fetched(self, epoch: int, step: int, plan: Plan, read: list[Any]) -> Fetched:
        own, first = plan.parts(0), plan.microbatches(0).start
        runs = own if any(own) else [plan.stand_in(0)]
        with kept_generators() if self._seeds.reproducible else nullcontext():
            parts = [
                self._collated(epoch, step, number, [read[i] for i in run])
                for number, run in enumerate(runs, first)
            ]
        return Fetched(epoch, step, first, parts, plan.counts(0), sum(map(len, own)))

    def _collated(self, epoch: int, step: int, number: int, samples: list[Any]) -> Any:
        if self._collate is None:
            return default_collate(samples)
        with self._seeds.around_part(User.COLLATE_FN, epoch, step, number):
            return self._collate(samples)


class _Seeded:
    """Samples of a stream, each drawn under a seed of its own, wherever and by whom it is read."""

    def __init__(self, dataset: Any, seed: int, epoch: int, rank: int) -> None:
        self._key = mix(seed, epoch)
        self._rank = rank
        self._drawn = 0
        with kept_generators():
            seed_generators(self._key)
            try:
                self._samples = iter(dataset)
            except Exception as error:  # user code: whatever it raises, say where
                what = "the stream"
                raise unreadable(what, rank, error) from error

    def skip(self, count: int) -> int:
        """Read the next `count` samples, or as many as there are; keep none, return how many."""
        with kept_generators():
            return sum(1 for _ in islice(self._each(), count))

    def take(self, count: int) -> list[Any]:
        """Return the next `count` samples, or as many as there are."""
        with kept_generators():
            return list(islice(self._each(), count))

    def _each(self) -> Iterator[Any]:
        while True:
            seed_generators(mix(self._key, self._drawn))
            self._drawn += 1
            try:
                sample = next(self._samples)
            except StopIteration:
                return
            except Exception as error:  # as above
                what = f"sample {self._drawn - 1} of the stream"
                raise unreadable(what, self._rank, error) from error
            yield sample


def not_of_this_stream(delivered: int, why: str) -> ValueError:
    """Return the error of a loader that is to go on where this stream has no such place."""
    return ValueError(
        f"`state` must have been taken of this stream, but its `delivered` is {delivered} samples, "
        f"and {why}: pass the stream that it was taken of, and look at what was saved"
    )


def alike(steps: Iterator[Fetched], first: int) -> Iterator[Fetched]:
    """Yield the steps, from number `first` on, of a stream that every worker reads whole.

    Raises:
        RuntimeError: where workers did not read the same.
    """
    before: Fetched | None = None
    for number, step in enumerate(steps, first):
        if step.step != number or (before is not None and not _follows(step, before)):
            msg = (
                "every worker must read the same stream, but they differ: let it not look at "
                "get_worker_info(), and draw from the default generators alone, or pass "
                "sharded=True if each rank and worker has its own"
            )
            raise RuntimeError(msg)
        before = step
        yield step


def _follows(step: Fetched, before: Fetched) -> bool:
    """Whether the reader of `step` read the same as that of the one before, which was no tail."""
    return step.read == before.read and sum(step.counts) <= sum(before.counts)


def _hash(samples: list[Any]) -> str:
    """Return a hash of the numbers and the text in `samples`: nothing is known of the rest."""
    digest = hashlib.sha256()
    for leaf in _leaves(samples):
        digest.update(leaf)
    return digest.hexdigest()[:16]


def _leaves(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        if value.layout == torch.strided:  # of a large one, some two thousand numbers will do
            yield repr(value.reshape(-1)[:: 1 + value.numel() // 2000].tolist()).encode()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif hasattr(value, "tobytes"):  # an array, a NumPy number, an image
        yield value.tobytes()
    elif isinstance(value, str | bytes | int | float | complex):
        yield repr(value).encode()
