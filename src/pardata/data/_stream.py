"""Iterable data sets: each sample on one rank and one worker, in the same steps at every size."""

import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from pardata.collective._tree import leaves
from pardata.data._plan import Plan, Step, share
from pardata.data._reader import Collation, StandsForDataset
from pardata.data._request import Fetched
from pardata.seeds._generators import kept_generators, seed_generators
from pardata.seeds._mix import mix


class Stream(StandsForDataset, IterableDataset[Fetched]):
    """An iterable data set as the loader's workers see it: it yields whole steps.

    Unless the data set is `sharded`, every rank and every worker goes through all of it and keeps
    its own part, so that the samples of a step are the same at every size; worker *w* of *n* makes
    the steps *w*, *w* + *n* and so on. A `sharded` one yields, on each rank and worker, samples
    that no other yields: they are batched as they come.
    """

    def __init__(self, dataset: Any, collation: Collation, plan: Plan, *, sharded: bool) -> None:
        self.plan = plan
        self.is_sharded = sharded
        self._collation = collation
        # After which sample to begin, also for workers that live on: they have copies of all else.
        self._start = torch.zeros(2, dtype=torch.int64).share_memory_()
        self.dataset = dataset

    def start_at(self, epoch: int, delivered: int) -> None:
        """Let the next ``iter()`` begin after so many samples of this epoch."""
        self._start.copy_(torch.tensor([epoch, delivered]))

    def __iter__(self) -> Iterator[Fetched]:
        epoch, delivered = self._start.tolist()
        worker = get_worker_info()
        worker_id, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        if self.is_sharded:
            return self._own_steps(epoch, worker_id, workers)
        return self._common_steps(epoch, delivered, worker_id, workers)

    def _common_steps(
        self, epoch: int, delivered: int, worker_id: int, workers: int
    ) -> Iterator[Fetched]:
        batch_size = self.plan.batch_size
        samples = _Seeded(self.dataset, self._collation, epoch)
        skipped = samples.skip(delivered)
        if skipped < delivered:
            raise not_of_this_stream(delivered, f"it ended after {skipped}")
        if delivered % batch_size:  # an incomplete batch is the last one
            if samples.take(1):
                why = f"it goes on there, in the middle of a batch of {batch_size}"
                raise not_of_this_stream(delivered, why)
            return
        first = delivered // batch_size
        digest = ""
        for number in count(first):
            read = samples.take(batch_size)
            if not read or (len(read) < batch_size and self.plan.drop_last):
                return
            digest = digest or _hash([read[0], read[-1]])
            if (number - first) % workers == worker_id:
                share = self.plan.share_of(len(read))
                yield self._fetched(share.of(epoch, number), share.runs, read, digest)

    def _own_steps(self, epoch: int, worker_id: int, workers: int) -> Iterator[Fetched]:
        plan = self.plan
        rows = len(share(plan.batch_size, plan.rank, plan.size))
        # A worker of its own seed, as the data set is to yield other samples in each.
        samples = _Seeded(self.dataset, self._collation, epoch, plan.rank, worker_id)
        for number in count(worker_id, workers):
            read = samples.take(rows)
            if not read or (len(read) < rows and plan.drop_last):
                return
            # It knows only how many samples the whole step should have.
            step = Step(epoch, number, 0, (len(read),), len(read), plan.batch_size)
            yield self._fetched(step, [range(len(read))], read)

    def _fetched(self, step: Step, runs: list[range], read: list[Any], digest: str = "") -> Fetched:
        with kept_generators() if self._collation.seeds.reproducible else nullcontext():
            batches = [
                self._collation.batch_of([read[i] for i in run], step, microbatch)
                for microbatch, run in enumerate(runs, step.first)
            ]
        return Fetched(step, batches, digest)


class _Seeded:
    """Samples of a stream, each drawn under a seed of its own, wherever and by whom it is read."""

    def __init__(self, dataset: Any, collation: Collation, epoch: int, *own: int) -> None:
        seed = collation.seeds.seed
        self._key = mix(mix(seed, *own) if own else seed, epoch)
        self._collation = collation
        self._drawn = 0
        with kept_generators():
            seed_generators(self._key)
            try:
                self._samples = iter(dataset)
            except Exception as error:  # user code: whatever it raises, say where
                what = "the stream"
                raise collation.unreadable(what, error) from error

    def skip(self, most: int) -> int:
        """Read the next `most` samples, or as many as there are; keep none, return how many."""
        with kept_generators():
            return sum(1 for _ in islice(self._each(), most))

    def take(self, most: int) -> list[Any]:
        """Return the next `most` samples, or as many as there are."""
        with kept_generators():
            return list(islice(self._each(), most))

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
                raise self._collation.unreadable(what, error) from error
            yield sample


def not_of_this_stream(delivered: int, why: str) -> ValueError:
    """Return the error of a loader that is to go on where this stream has no such place."""
    return ValueError(
        f"`state` must have been taken of this stream, but its `delivered` is {delivered} samples, "
        f"and {why}: pass the stream that it was taken of, and look at what was saved"
    )


def alike(fetched: Iterator[Fetched], first: int) -> Iterator[Fetched]:
    """Yield the steps, from number `first` on, of a stream that every worker reads whole.

    Raises:
        RuntimeError: where workers did not read the same.
    """
    before: Fetched | None = None
    for number, current in enumerate(fetched, first):
        if current.step.number != number or (before and not _follows(current, before)):
            msg = (
                "every worker must read the same stream, but they differ: let it not look at "
                "get_worker_info(), and draw from the default generators alone, or pass "
                "sharded=True if each rank and worker has its own"
            )
            raise RuntimeError(msg)
        before = current._replace(batches=[])
        yield current


def _follows(current: Fetched, before: Fetched) -> bool:
    """Whether both readers read the same, and the one before was no tail."""
    return current.digest == before.digest and current.step.samples <= before.step.samples


def _hash(samples: list[Any]) -> str:
    """Return a hash of the numbers and the text in `samples`: nothing is known of the rest."""
    digest = hashlib.sha256()
    for _, leaf in leaves(samples):
        if isinstance(leaf, Tensor):
            if leaf.layout == torch.strided:  # of a large one, some two thousand numbers will do
                thinned = leaf.reshape(-1)[:: 1 + leaf.numel() // 2000]
                digest.update(repr(thinned.tolist()).encode())
        elif hasattr(leaf, "tobytes"):  # an array, a NumPy number, an image
            digest.update(leaf.tobytes())
        elif isinstance(leaf, str | bytes | int | float | complex):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()[:16]
