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

    Unless the dataset is `sharded`, every rank reads all of it, here or in one worker, and keeps
    its own part. So the samples of a step are the same at every size. A `sharded` one yields, on
    each rank and worker, samples that no other yields: they are batched as they come.
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
        """Let the next ``iter()`` begin with this epoch; or within it, if there is a `state`.

        The dataset had it after so many samples. Only workers that start now get it.
        """
        self._start[0], self._start[1] = epoch, 0 if state is None else delivered
        self._state = state

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._steps(*self._start.tolist())
        except Exception as error:
            if get_worker_info() is None:
                raise
            rank = self.plan.rank  # as in `Reader`
            yield RemoteError.of(error, rank=rank, call="a worker of the loader")

    def _steps(self, epoch: int, delivered: int) -> Iterator[Fetched]:
        """Yield the steps after those delivered; of a sharded dataset those of this worker."""
        plan, rows = self.plan, self.plan.batch_size
        worker, workers, reader = 0, 1, tuple[int, ...]()
        if self.is_sharded:
            info = get_worker_info()
            worker, workers = (info.id, info.num_workers) if info else (0, 1)
            rows = len(share(plan.batch_size, plan.rank, plan.size))
            # A worker of its own seed, as the dataset is to yield other samples in each.
            reader = plan.rank, worker
        if delivered % rows:  # an incomplete batch is the last one
            return
        samples, digest = self._seeded(epoch, rows, *reader, first=delivered), ""
        for number in count(delivered // rows + worker, workers):
            with kept_generators():
                read = list(islice(samples, rows))
            if not read or (len(read) < rows and plan.drop_last):
                return
            digest = digest or self._beginning(read)
            if self.is_sharded:
                # It knows only how many samples the whole step should have.
                runs = [range(len(read))]
                step = GlobalStep(epoch, number, 0, len(read), plan.batch_size)
            else:
                step, runs = plan.share_of(len(read), epoch, number)
            yield self._fetched(step, runs, read, digest)

    def _beginning(self, read: list[Any]) -> str:
        """Return a hash of the first samples. Objects have none: then it tells ranks apart."""
        ends = [read[0], read[-1]]
        has_hash = (
            isinstance(leaf, _HASHED) or hasattr(leaf, "tobytes")
            for _, leaf in leaves_with_path(ends)
        )
        apart = self.is_sharded and not all(has_hash)
        return content_hash(ends) + (f" of rank {self.plan.rank}" if apart else "")

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
