"""Iterable datasets: each sample on one rank and one worker, in the same steps at every size."""

from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from inspect import signature
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from pardata._pytree import content_hash, leaves_with_path
from pardata.data._plan import Fetched, GlobalStep, Plan, share
from pardata.data._reader import Collation
from pardata.rng._rng_state import kept_generators, seed_generators
from pardata.rng._seeds import mix
from pardata.store._remote_error import RemoteError

_END = object()
_HASHED = (torch.Tensor, str, bytes, int, float, complex, type(None))  # by `content_hash`


class Stream(IterableDataset[Fetched]):
    """An iterable dataset as the loader's workers see it: it yields whole steps.

    Unless the dataset is `sharded`, every rank and every worker reads all of it and keeps its own
    part. So the samples of a step are the same at every size. Worker *w* of *n* makes the steps
    *w*, *w* + *n* and so on. A `sharded` one yields, on each rank and worker, samples that no other
    yields: they are batched as they come.
    """

    def __init__(self, dataset: Any, collation: Collation, plan: Plan, *, sharded: bool) -> None:
        self.dataset, self.plan = dataset, plan
        self.is_sharded = sharded
        # Else the state would be another on each rank.
        self.keeps_place = _has_state(dataset) and not sharded
        self.collation = collation
        # After which sample to begin, also for workers that live on: they have copies of all else.
        self._start = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()
        self._state: Any = None

    def start_at(self, epoch: int, delivered: int, state: Any) -> None:
        """Let the next ``iter()`` begin after so many samples of this epoch.

        There the dataset had this `state`, if it has any. Only workers that start now get it.
        """
        self._start[0], self._start[1] = epoch, delivered
        self._state = state

    def __iter__(self) -> Iterator[Any]:
        epoch, delivered = self._start.tolist()
        worker = get_worker_info()
        if worker is None:
            yield from self._steps(epoch, delivered, 0, 1)
            return
        try:
            yield from self._steps(epoch, delivered, worker.id, worker.num_workers)
        except Exception as error:  # noqa: BLE001  # as in `Reader`
            rank = self.plan.rank
            yield RemoteError.of(error, rank=rank, call="a worker of the loader")

    def _steps(self, epoch: int, delivered: int, worker: int, workers: int) -> Iterator[Fetched]:
        if self.is_sharded:
            return self._sharded(epoch, worker, workers)
        return self._shared(epoch, delivered, worker, workers)

    def _shared(self, epoch: int, delivered: int, worker: int, workers: int) -> Iterator[Fetched]:
        """Yield a worker's steps of samples that all ranks and workers read."""
        batch_size = self.plan.batch_size
        samples, digest = self._after(epoch, delivered)
        if delivered % batch_size:  # an incomplete batch is the last one
            # A state that was taken at the end may be that of the next epoch's start.
            if self._state is None and _next(samples, 1):
                why = f"it continues there, in the middle of a batch of {batch_size}"
                raise not_of_this_stream(delivered, why)
            return
        first = delivered // batch_size
        for number, read in enumerate(self._shares(samples, batch_size), first):
            digest = digest or content_hash([read[0], read[-1]])
            if (number - first) % workers == worker:
                step, runs = self.plan.share_of(len(read), epoch, number)
                yield self._fetched(step, runs, read, digest)

    def _after(self, epoch: int, delivered: int) -> tuple[Iterator[Any], str]:
        """Return the samples after those delivered, and the hash of those that were read again."""
        batch_size = self.plan.batch_size
        if delivered and self._state is not None:
            return self._seeded(epoch, batch_size, first=delivered), ""
        samples = self._seeded(epoch, batch_size)
        begin = _next(samples, min(delivered, batch_size))
        read, digest = len(begin), content_hash([begin[0], begin[-1]]) if begin else ""
        del begin  # what is read again is not kept
        with kept_generators():
            read += sum(1 for _ in islice(samples, delivered - read))
        if read < delivered:
            raise not_of_this_stream(delivered, f"it ended after {read}")
        return samples, digest

    def _sharded(self, epoch: int, worker: int, workers: int) -> Iterator[Fetched]:
        """Yield a worker's steps of samples that it alone reads."""
        plan = self.plan
        rows = len(share(plan.batch_size, plan.rank, plan.size))
        # A worker of its own seed, as the dataset is to yield other samples in each.
        samples = self._seeded(epoch, rows, plan.rank, worker)
        steps, digest = count(worker, workers), ""
        for number, read in zip(steps, self._shares(samples, rows), strict=False):
            digest = digest or self._beginning(read)
            # It knows only how many samples the whole step should have.
            step = GlobalStep(epoch, number, 0, len(read), plan.batch_size)
            yield self._fetched(step, [range(len(read))], read, digest)

    def _beginning(self, read: list[Any]) -> str:
        """Return a hash of the first samples. Objects have none: then it tells ranks apart."""
        ends = [read[0], read[-1]]
        has_hash = (
            isinstance(leaf, _HASHED) or hasattr(leaf, "tobytes")
            for _, leaf in leaves_with_path(ends)
        )
        return content_hash(ends) + ("" if all(has_hash) else f" of rank {self.plan.rank}")

    def _shares(self, samples: Iterator[Any], rows: int) -> Iterator[list[Any]]:
        """Yield the samples by `rows`, and what is left of them, unless that is dropped."""
        while read := _next(samples, rows):
            if len(read) == rows or not self.plan.drop_last:
                yield read

    def _fetched(
        self, step: GlobalStep, runs: list[range], read: list[Any], digest: str
    ) -> Fetched:
        # A copy, as the dataset may change its own; in a tuple, see `Position`.
        state = (deepcopy(self.dataset.state_dict()),) if self.keeps_place else None
        first, collated = step.number * self.plan.batch_size, []
        with self.collation.around_reading():
            for number, run in enumerate(runs, step.first):
                samples, indices = [read[i] for i in run], [first + i for i in run]
                collated.append(self.collation.batch_of(samples, indices, step, number))
        batches, missing = map(list, zip(*collated, strict=True))
        return Fetched(step, batches, digest, state, missing)

    def _seeded(self, epoch: int, together: int, *reader: int, first: int = 0) -> Iterator[Any]:
        """Yield the samples, so many `together` under one seed, wherever and by whom they are read.

        To seed for each sample takes as long as to decode a small one. The default generators are
        left seeded: keep them around the reading of those that are read together.
        """
        seed = self.collation.seed
        key = mix(mix(seed, *reader) if reader else seed, epoch)
        what = "the iterable dataset"
        try:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            if first:
                self.dataset.load_state_dict(deepcopy(self._state[0]))
            seed_generators(key)
            samples = iter(self.dataset)
            for number in count(first):
                what = f"sample {number} of the iterable dataset"
                if number % together == 0:
                    seed_generators(mix(key, number))
                sample = next(samples, _END)
                if sample is _END:
                    return
                yield sample
        except Exception as error:  # user code: whatever it raises, say where
            raise self.collation.failed(f"{what} could not be read", error) from error


def _has_state(dataset: Any) -> bool:
    """Whether a dataset has a state for every caller: litdata's has one for its own loader only."""
    with suppress(AttributeError, TypeError):
        signature(dataset.state_dict).bind()
        return hasattr(dataset, "load_state_dict")
    return False


def _next(samples: Iterator[Any], most: int) -> list[Any]:
    """Return the next `most` samples, or as many as there are."""
    with kept_generators():
        return list(islice(samples, most))


def not_of_this_stream(delivered: int, why: str) -> ValueError:
    """Return the error of a loader that is to resume where this stream has no such place."""
    return ValueError(
        f"`state` must be of this iterable dataset, but its `delivered` is {delivered} samples, "
        f"and {why}: pass the dataset that the state was taken of, or look at what was saved"
    )
