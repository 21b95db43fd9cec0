"""Iterable datasets: divides samples over ranks and workers, and ends on all ranks together.

Does not balance a sharded dataset: a rank that ends early gets empty batches.
"""

from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from functools import partial
from inspect import signature
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from pardata._pytree import content_hash, leaves_with_path
from pardata.collectives._fingerprint import CheckedCollective, WaitMinMax
from pardata.data._fetcher import Collator
from pardata.data._loader_state import Position
from pardata.data._plan import FetchedStep, Plan, StepInfo, local_range
from pardata.data._step_source import StepSource
from pardata.environment._world import store_client
from pardata.rng._rng_state import fork_rng, seed_generators
from pardata.rng._seeds import mix
from pardata.store._rank_errors import RemoteError, format_ranks
from pardata.store._round import exchange, raise_if_different

_END = object()
# The types that `content_hash` hashes.
_HASHED = (torch.Tensor, str, bytes, int, float, complex, type(None))
_NEXT = "the next step of an IterableDataset"


class IterableFetcher(IterableDataset[FetchedStep]):
    """The iterable dataset that the loader's workers read: yields the steps of this rank.

    Unless the dataset is `sharded`, every rank reads all samples, in one worker at most, and keeps
    its range of each step. So the samples of a step are the same at every world size. A `sharded`
    dataset yields different samples on each rank and worker, and each batches its samples in order.
    """

    def __init__(self, dataset: Any, collation: Collator, plan: Plan, *, sharded: bool) -> None:
        self.dataset, self.plan, self.is_sharded = dataset, plan, sharded
        # The state of a sharded dataset would differ between ranks.
        self.keeps_place = _has_state(dataset) and not sharded
        self.collation = collation
        # Epoch and first sample, of shape (2,), in shared memory, because persistent workers have
        # copies of all other attributes.
        self._start = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()
        self._state: Any = None

    def seek(self, epoch: int, delivered: int, state: Any) -> None:
        """Let the next ``iter()`` begin at this epoch; with a `state` after `delivered` samples.

        Only workers that start afterwards get the state.
        """
        self._start[0], self._start[1] = epoch, 0 if state is None else delivered
        self._state = state

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._steps(*self._start.tolist())
        except Exception as error:
            if get_worker_info() is None:
                raise
            yield RemoteError.of(error, rank=self.plan.rank, call="a worker of the loader")

    def _steps(self, epoch: int, delivered: int) -> Iterator[FetchedStep]:
        """Yield the steps after `delivered` samples; those of this worker if sharded."""
        plan, step_samples = self.plan, self.plan.batch_size
        worker, workers, reader = 0, 1, tuple[int, ...]()
        if self.is_sharded:
            info = get_worker_info()
            worker, workers = (info.id, info.num_workers) if info else (0, 1)
            step_samples = len(local_range(plan.batch_size, plan.rank, plan.size))
            # Another seed in each worker, because samples differ.
            reader = plan.rank, worker
        if delivered % step_samples:  # an incomplete batch was the last
            return
        samples, digest = self._seeded(epoch, step_samples, *reader, first=delivered), ""
        for number in count(delivered // step_samples + worker, workers):
            with fork_rng():
                read = list(islice(samples, step_samples))
            if not read or (len(read) < step_samples and plan.drop_last):
                return
            digest = digest or self._beginning(read)
            if self.is_sharded:
                # The number of samples of the other ranks is unknown: assume a full step.
                runs = [range(len(read))]
                step = StepInfo(epoch, number, 0, len(read), plan.batch_size)
            else:
                step, runs = plan.local_ranges(len(read), epoch, number)
            yield self._fetched(step, runs, read, digest)

    def _beginning(self, read: list[Any]) -> str:
        """Return a hash of the first and last sample, with the rank if objects have no hash."""
        ends = [read[0], read[-1]]
        leaves = [leaf for _, leaf in leaves_with_path(ends)]
        have_hash = all(isinstance(leaf, _HASHED) or hasattr(leaf, "tobytes") for leaf in leaves)
        with_rank = self.is_sharded and not have_hash
        return content_hash(ends) + (f" of rank {self.plan.rank}" if with_rank else "")

    def _fetched(
        self, step: StepInfo, runs: list[range], read: list[Any], digest: str
    ) -> FetchedStep:
        # A copy, because the dataset may change its state. In a tuple: see `Position`.
        state = (deepcopy(self.dataset.state_dict()),) if self.keeps_place else None
        first, collated = step.number * self.plan.batch_size, []
        with self.collation.fork_rng():
            for number, run in enumerate(runs, step.first):
                samples, indices = [read[i] for i in run], [first + i for i in run]
                collated.append(self.collation.batch_of(samples, indices, step, number))
        batches, missing = map(list, zip(*collated, strict=True))
        return FetchedStep(step, batches, digest, state, missing)

    def _seeded(self, epoch: int, together: int, *reader: int, first: int = 0) -> Iterator[Any]:
        """Yield the samples from `first` on, with a new seed after every `together` samples.

        To seed for each sample would take as long as to decode a small one. The caller restores the
        default generators after each group.
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
        except Exception as error:  # user code may raise anything
            raise self.collation.failed(f"{what} could not be read", error) from error


def _has_state(dataset: Any) -> bool:
    """Whether a dataset has ``state_dict()`` without arguments; litdata's requires arguments."""
    with suppress(AttributeError, TypeError):
        signature(dataset.state_dict).bind()
        return hasattr(dataset, "load_state_dict")
    return False


class LockstepSource(StepSource):
    """The steps of an iterable dataset, which end at the same step on all ranks."""

    _has_yielded = False  # a step, in any epoch

    def steps(self, start: Position) -> Iterator[FetchedStep]:
        """Yield the steps after the position `start`. Each step is collective with several ranks.

        Raises:
            ValueError: no step ends at the number of samples of `start`.
            RuntimeError: the epoch has no step, and an earlier epoch had some. Every rank raises
                it.
        """
        stream: IterableFetcher = self.reader
        state = start.state if stream.keeps_place else None
        if state is not None:
            self._workers = None  # new ones get the state
        stream.seek(start.epoch, start.delivered, state)
        fetched = self._start_epoch(start.epoch, lambda: iter(stream))
        # A stateful dataset resumes at `start`; any other is read again from the first sample.
        again, before = (start.delivered, start.digest) if state is None else (0, None)
        is_single, number, read = self._ranks.size == 1, 0, 0
        steps = fetched if is_single else self._lockstep(fetched, before)
        for number, current in enumerate(steps, start=1):
            if is_single and number == 1:
                self._compare(current, before)
            if read == again:
                self._has_yielded = True
                yield current
                continue
            read += current.step.samples
            if read > again:
                break
        if read != again:
            raise ValueError(
                f"`state` must be of this iterable dataset, but its `delivered` is {again} "
                f"samples, and the first {number} steps have {read}: pass the dataset of the state"
            )
        if not (number or start.delivered) and self._has_yielded:
            kind = type(stream.dataset).__name__
            msg = f"{kind} yielded nothing in epoch {start.epoch}: let __iter__ make a new iterator"
            raise RuntimeError(msg)

    def _lockstep(self, steps: Iterator[FetchedStep], before: str | None) -> Iterator[FetchedStep]:
        """Yield this rank's `steps`, then the last one without rows until all ranks are at the end.

        Collective: while a step is computed, ranks exchange the number of samples of the next one.

        Raises:
            RuntimeError: on every rank: the dataset ends at different steps, a rank of a sharded
                one has no sample at all, or `steps` raises an error.
        """
        stream = self.reader
        last: Any = None  # the last step of this rank
        coming, counts = _start_next(steps)
        while True:
            ((fewest, most),) = counts()
            if not most or (not fewest and stream.is_sharded and stream.plan.drop_last):
                return
            is_wrong = last is None and not fewest if stream.is_sharded else fewest != most
            if is_wrong:
                exchange(store_client(self._ranks), _NEXT, partial(_samples_in, coming), _ended_on)
            if last is None and coming:
                self._compare(coming, before)
            # Without a step, repeat the last one without rows. Every rank has a first one.
            last = coming or last._replace(step=last.step._replace(local_samples=0))
            coming, counts = _start_next(steps)
            yield last

    def _compare(self, first: FetchedStep, before: str | None) -> None:
        """Compare the hash of the first samples between ranks, and with `before`. Collective.

        Raises:
            RuntimeError: the ranks read different samples, or equal ones of a sharded dataset.
            ValueError: the dataset is read again to resume, and yields other samples.
        """

        def decide(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
            if self.reader.is_sharded:
                if len(facts) > 1 and all(fact == facts[0] for fact in facts):
                    raise RuntimeError(
                        f"each rank must have its own samples with sharded=True, but all "
                        f"{len(facts)} begin alike: split by world().rank too, or omit sharded=True"
                    )
                return facts
            cure = "Yield the same samples on every rank, or pass sharded=True if each has its own."
            raise_if_different("make_loader(IterableDataset)", facts, cure)
            return facts[:1]

        local_facts, call = {"first samples": first.digest}, "iter(loader) of an IterableDataset"
        digests = exchange(store_client(self._ranks), call, lambda: local_facts, decide)
        self.digest = content_hash(digests)
        if before not in (None, self.digest):
            raise ValueError(
                "`dataset` must yield the same samples again to resume: use the default generators "
                "alone, or, without `sharded`, give it state_dict() and load_state_dict()"
            )


def _samples_in(coming: FetchedStep | None) -> int:
    return 0 if coming is None else coming.step.samples


def _start_next(steps: Iterator[FetchedStep]) -> tuple[FetchedStep | None, WaitMinMax]:
    """Return the next step of this rank, None at the end, and a wait for the numbers of samples.

    The ranks exchange these while the step before runs. After an error of `steps` on any rank the
    wait raises it on every rank.
    """
    collective = CheckedCollective(_NEXT, dict, str)
    coming = collective.capture(lambda: next(steps, None), None)
    return coming, collective.start_min_max([_samples_in(coming)])


def _ended_on(counts: list[int]) -> None:
    shorter = format_ranks([rank for rank, count in enumerate(counts) if count < max(counts)])
    msg = f"every rank must have samples for this step, but they ended early on {shorter} of "
    msg += f"{len(counts)}: yield the same everywhere, or pass sharded=True and give each rank some"
    raise RuntimeError(msg)
