"""The loader: iterates over epochs, measures its waits, saves and restores its position."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn, TypeAlias

from torch import Tensor
from torch.utils.data import Dataset

from pardata._validation import FixedArguments, check_int
from pardata.data._batch import ReadRecord, delivered, empty_batch
from pardata.data._config import LoaderConfig
from pardata.data._device_prefetch import DeviceTransfer
from pardata.data._loader_state import EpochCursor, StateSchema
from pardata.data._microbatches import Microbatches
from pardata.data._plan import FetchedStep, Plan, StepInfo
from pardata.data._sampler import GlobalBatchSampler, length_of
from pardata.data._step_source import DataLoaderOptions, StepSource
from pardata.data._wait_timer import WaitTimer
from pardata.environment._logger import get_logger

_log = get_logger(__name__)

# A wait is logged if it takes this many seconds and this fraction of an epoch.
_LONG, _LONG_FRACTION = 1.0, 0.3

Parts: TypeAlias = tuple[StateSchema, StepSource, DeviceTransfer]


class Loader(FixedArguments):
    """This rank's batches, epoch after epoch; made by `make_loader`.

    An ``iter()`` begins the next epoch when it is asked for its first batch, also after a ``break``
    or an error. In the body of `epochs` it runs that epoch instead. One epoch runs at a time: the
    next one ends the one before. A loader saves and resumes as PyTorch's ``Stateful``. To set an
    argument of `make_loader` on it is an AttributeError: make another loader.

    Attributes:
        dataset: as given.
        batch_size: samples of a step, over all ranks; None if a `batch_sampler` decides.

    >>> from pardata import make_loader
    >>> loader = make_loader(range(5), batch_size=2)
    >>> len(loader), loader.epoch, loader.batch_size
    (3, 0, 2)
    """

    _arguments = frozenset({*LoaderConfig.__annotations__, *DataLoaderOptions.__annotations__})
    dataset: Dataset[Any]
    batch_size: int | None

    def __init__(self, plan: Plan, parts: Parts, again: Callable[[object], Parts | None]) -> None:
        self._plan, self._with_seed = plan, again
        self._schema, self._source, self._transfer = parts
        vars(self).update(dataset=self._source.reader.dataset, batch_size=plan.batch_size or None)
        self.cursor = EpochCursor()
        self._clock = WaitTimer()
        self._has_spoken = False

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch, the same on every rank."""
        requests: GlobalBatchSampler | None = self._source.requests
        by, whose, length = "dataset", self.dataset, self._plan.length
        if requests is not None and requests.sampler is not None:
            by, whose, length = requests.name, requests.sampler, length_of(requests.sampler)
        if length is None:
            raise TypeError(f"the {by} must have a __len__, but {type(whose).__name__} has none")
        return length if self.batch_size is None else len(replace(self._plan, length=length))

    @property
    def epoch(self) -> int:
        """The epoch in progress, or else the one that the next ``iter()`` will run."""
        return self.cursor.epoch

    @property
    def sampler(self) -> NoReturn:
        """Raises, because code that asks for a sampler would skip or divide samples itself."""
        msg = "a loader has no `sampler`, because it resumes by itself: leave out accelerate's"
        msg += " skip_first_batches, or pass ignore_data_skip=True to transformers' Trainer"
        raise AttributeError(msg)

    @property
    def batch_sampler(self) -> SimpleNamespace:
        """An object with the loader as `sampler`, in which Lightning finds ``set_epoch``."""
        return SimpleNamespace(sampler=self)

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the remaining epochs of `count`: ``for epoch in loader.epochs(count)``.

        A new loader begins at the first epoch. After `load_state_dict` it begins at the epoch in
        which the state was saved, with the remaining batches. If none remain, the loop over the
        batches has no iterations, and the code after it still runs.
        Epochs that ran to their end count as done, also in an earlier loop. If you leave this loop
        in the middle of an epoch, or look at a batch outside of it, that epoch is not done. The
        next loop runs it from its first batch.

        In the body each ``iter()`` runs the same epoch, however often you call it. The end of the
        body moves to the next epoch, even if a ``break`` left some batches. So a state that you
        save in the body after that ``break`` resumes in the next epoch. To resume in the middle,
        save before the ``break``. ``loader.epoch`` is `epoch` there too. Not collective.

        >>> from pardata import make_loader
        >>> loader = make_loader(range(4), batch_size=2)
        >>> look = next(iter(loader))
        >>> [(epoch, len(list(loader))) for epoch in loader.epochs(2)]
        [(0, 2), (1, 2)]
        >>> list(loader.epochs(2))
        []
        """
        count = check_int("count", count, least=0)
        if 0 < count <= (done := self.cursor.next_unfinished.epoch):
            text = "epochs(%d) runs nothing: the run has done %d; to train longer, pass more"
            _log.warning(text, count, done, ranks=[0], once=True)
        while (start := self.cursor.next_unfinished).epoch < count:
            with self.cursor.pinned_epoch(start):
                yield start.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` run this epoch. Not needed, because epochs advance by themselves.

        After `load_state_dict`, the epoch of that state still runs only its remaining steps.
        """
        self.cursor.set_epoch(check_int("epoch", epoch, least=0))

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is, as a few numbers that are the same on every rank.

        A step counts as delivered once the loop has its batch: in the body of step k, and after a
        ``break`` there. Batches that were read ahead do not count. Not collective.
        """
        if self.cursor.counts_as_done:
            text = "a state saved after `break` resumes in the next epoch: save it before `break`"
            _log.warning(text, ranks=[0], once=True)
        return self._schema.state(self.cursor.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` resume where `state` was taken, at any world size.

        It yields the samples of that epoch that were not yet delivered, in the same global batches.
        ``len()`` stays that of a whole epoch. A loop that runs over the loader ends with an error
        if it asks for another batch. The loader reads an ``IterableDataset`` again up to there. If
        that ends before, the ``iter()`` raises a ValueError. Not collective.

        Another batch size or microbatch size begins at the next sample, and a line says so. An
        ``IterableDataset`` or a `batch_sampler` must have the same batches.

        Raises:
            ValueError: `state` is that of another dataset, seed or order, which the error names, or
                it is no state of a loader.
        """
        seed = state.get("seed") if isinstance(state, Mapping) else None
        parts = self._schema, self._source, self._transfer
        if seed != self._schema.facts["seed"]:
            parts = self._with_seed(seed) or parts  # the state of another loader of this run
        start = parts[0].position(state)
        self.cursor.resume_at(start)
        self._schema, self._source, self._transfer = parts
        if self._schema.is_stream and start.delivered and start.state is None:
            _log.info("the loader reads %d samples again, to resume after them", start.delivered)

    def stats(self) -> dict[str, float]:
        """Return how long this rank waited for data in the epoch in progress, or in the last one.

        ``wait_seconds`` of ``seconds`` were spent waiting for data, the fraction ``wait_share``.
        ``samples`` is the number of samples delivered on all ranks, with ``samples_per_second``.
        ``imbalance`` is the largest local batch over the mean, by `cost` or in samples, and
        ``imbalance_by_number`` the same without `cost`. Both are absent before the first step, and
        nan if `sharded`. Not collective.
        """
        return self._clock.stats()

    def fingerprint(self) -> str:
        """Return a hash of the samples delivered in the epoch in progress, or the last.

        It hashes their indices, in the order of the epoch. So it is the same on every rank, at
        every world size, and after resuming. Not collective, unless it must ask a `sampler` for the
        order of an epoch that has not begun here.

        Raises:
            TypeError: the dataset is an ``IterableDataset``, whose samples have no indices.
        """
        requests: GlobalBatchSampler | None = self._source.requests
        if requests is None:
            raise TypeError("an IterableDataset has no indices to hash: hash what you get")
        return requests.fingerprint(*self.cursor.now[:2])

    def __iter__(self) -> Iterator[Any]:
        """Run the next epoch, or the remaining steps of a loaded one.

        It begins when the first batch is asked for. Collective only with a `sampler` or an
        ``IterableDataset``.
        """
        # Inside the generator, because Lightning sets the epoch after iter().
        cursor, begun = self.cursor, self.cursor.begin()
        self._clock = clock = WaitTimer()
        try:
            fetched = self._source.steps(cursor.now)
            clock.waited = clock.seconds()  # the time to draw the order and start workers
            batches = self._transfer.prefetched(fetched, self._shaped)
            cursor.use_up(begun)
            while True:
                cursor.check(begun)
                step, state, batch = clock.timed_next(batches)
                if step is None:
                    break
                clock.count(step)
                cursor.delivered(begun, step.samples, self._source.digest, state)
                if self._plan.microbatch_size is None:  # `Microbatches` have their counts
                    delivered.add(batch, ReadRecord(step.local_samples, self._plan.size))
                yield batch
                del batch  # the next batch may reuse its memory, which is still in the cache
            cursor.finished(begun)
            self._speak_of_waiting(clock)
        except GeneratorExit:
            cursor.abandon(begun)
            raise
        finally:
            begun.is_running = False
            clock.stop()

    def _shaped(self, fetched: FetchedStep) -> tuple[StepInfo, Any, Any]:
        """Return a step, a stateful dataset's state after it, and the batch or `Microbatches`."""
        step = fetched.step
        batches = self._transfer.transferred(fetched)
        if self._plan.microbatch_size is not None:
            facts: dict[str, Any] = {"epoch": step.epoch, "step": step.number, "first": step.first}
            facts |= {"counts": self._plan.microbatch_sizes(step.samples)}
            facts |= {"seed": self._schema.facts["seed"], "size": self._plan.size}
            facts |= {"ranges": step.ranges, "by_cost": self._plan.costs is not None}
            read = batches if step.local_samples else ()
            facts |= {"missing": fetched.missing[: len(read)], "placeholder": batches[0]}
            return step, fetched.state, Microbatches(read, **facts)
        (batch,), missing = batches, sum(fetched.missing)
        # In the first step for the last one, if a local batch may be a list of samples.
        rest = 0 if step.number or isinstance(batch, Tensor) else self._plan.rest
        if step.local_samples == 0 or step.samples < self._plan.size or 0 < rest < self._plan.size:
            # On every rank, so that all raise if the batch cannot be emptied.
            is_column = self._source.reader.collation.collate_fn is None
            samples = None if self._schema.is_stream or missing else max(step.local_samples, 1)
            empty = empty_batch(batch, lists_are_columns=is_column, samples=samples)
            batch = batch if step.local_samples else empty
        if missing:
            step = step._replace(local_samples=max(0, step.local_samples - missing))
        return step, fetched.state, batch

    def _speak_of_waiting(self, clock: WaitTimer) -> None:
        stats = clock.stats()
        is_long = stats["wait_seconds"] >= _LONG and stats["wait_share"] >= _LONG_FRACTION
        if is_long and not self._has_spoken:
            self._has_spoken = True
            text = f"the epoch waited {stats['wait_share']:.0%} of its {stats['seconds']:.1f} s for"
            text += " data: raise num_workers, or use cache_dataset or batch_transform"
            _log.warning(text, ranks=[0])
