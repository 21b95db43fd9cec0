"""Reading a rank's part of a step, in a worker or here: seeded, collated, and errors say where."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from pardata.data._batched_read import batch_reader, cpu_default_device, has_getitems
from pardata.data._plan import FetchedStep, StepInfo
from pardata.data._sampler import FetchRequest, as_list
from pardata.rng import _rng_state as generators
from pardata.rng._seeds import mix
from pardata.store._remote_error import RemoteError

_LOOKED_AT = 16  # steps at the start of an epoch whose functions must not draw; then one in 16


class Collator(NamedTuple):
    """How samples become a batch: seeded, collated, and with an error that says where.

    Attributes:
        reproducible: whether each sample and each call for a microbatch is seeded.
        microbatches: whether there are any. Else what collates must not draw.
        rank: of this process, also if nothing is shared out.
    """

    collate_fn: Callable[[list[Any]], Any] | None
    seed: int
    reproducible: bool
    microbatches: bool
    rank: int

    def fork_rng(self) -> generators.ForkedRng:
        """Return the context in which the samples of a step are read and collated."""
        return generators.ForkedRng(generators.default_generators() if self.reproducible else ())

    def context_for(
        self, user: str, step: StepInfo, microbatch: int, device: torch.device | None = None
    ) -> AbstractContextManager[None]:
        """Return the context in which `user` sees one microbatch, or one rank's share.

        A `user` is an argument or a method, by its name: each draws other numbers. Without a
        `device` it is within `fork_rng`, which puts the generators back.
        """
        if not self.reproducible:
            return nullcontext()
        if not self.microbatches:
            # Not always: NumPy takes longer to tell its state than a cache to read a batch.
            looks = step.number < _LOOKED_AT or step.number % _LOOKED_AT == 0
            return generators.forbid_rng_use(user, device) if looks else nullcontext()
        seed = mix(self.seed, step.epoch, step.number, microbatch, _number_of(user))
        if device is not None:
            return generators.fork_rng(seed, device)
        generators.seed_generators(seed)
        return nullcontext()

    def batch_of(
        self, samples: Any, indices: Any, step: StepInfo, microbatch: int
    ) -> tuple[Any, int]:
        """Return the batch, and how many samples are None: a ``collate_fn`` leaves those out."""
        if self.collate_fn is None:
            try:
                with cpu_default_device():
                    return default_collate(samples), 0
            except Exception as error:  # samples differ, or are of an unknown kind
                raise self.failed(f"samples {indices} could not be collated", error) from error
        with self.context_for("collate_fn", step, microbatch):
            missing = sum(sample is None for sample in samples)
            return self.call("collate_fn", self.collate_fn, samples, step), missing

    def call(self, user: str, function: Callable[[Any], Any], given: Any, step: StepInfo) -> Any:
        """Return ``function(given)``; say where, if that raises."""
        try:
            return function(given)
        except Exception as error:  # a StopIteration too, which is not the epoch's end
            what = f"`{user}` failed in step {step.number} of epoch {step.epoch}"
            raise self.failed(what, error) from error

    def failed(self, what: str, error: Exception) -> RuntimeError:
        """Return the error that says what could not be done, where, and what happened."""
        worker = get_worker_info()
        where = f"on rank {self.rank}" + (f", worker {worker.id}" if worker else "")
        return RuntimeError(f"{what} {where}: {type(error).__name__}: {error}")


class MapFetcher(Dataset[Any]):
    """A dataset as the loader's workers see it: asked for a `FetchRequest`, it returns batches."""

    def __init__(self, dataset: Any, collation: Collator) -> None:
        self.dataset, self.collation = dataset, collation
        self.find_batch_reader()
        self._by_items = has_getitems(dataset)
        self._epoch = -1  # that the dataset was told

    def find_batch_reader(self) -> None:
        """Find out how to read whole batches, once the dataset has changed, too."""
        collates = self.collation.collate_fn is not None
        self._batch_reader = None if collates else batch_reader(self.dataset)

    def __getitem__(self, request: FetchRequest) -> FetchedStep | RemoteError:
        """Return what is asked for; in a worker an error, too, for DataLoader changes its text."""
        try:
            return self._fetched(request)
        except Exception as error:
            if get_worker_info() is None:
                raise
            return RemoteError.of(error, rank=self.collation.rank, call="a worker of the loader")

    def _fetched(self, request: FetchRequest) -> FetchedStep:
        step, asked, positions = request
        if step.epoch != self._epoch and hasattr(self.dataset, "set_epoch"):
            # Here too: a worker has a copy of its own.
            self.collation.call("set_epoch", self.dataset.set_epoch, step.epoch, step)
        self._epoch = step.epoch
        if (read := self._batch_reader) is not None:
            batches = [self._call(read, torch.as_tensor(each, device="cpu")) for each in asked]
            return FetchedStep(step, batches)
        indices = [as_list(each) for each in asked]
        wanted = zip(count(step.first), indices, positions or indices, strict=False)
        with self.collation.fork_rng():
            found = [self._batch(step, *each) for each in wanted]
        return FetchedStep(step, [batch for batch, _ in found], missing=[none for _, none in found])

    def _batch(
        self, step: StepInfo, microbatch: int, indices: Sequence[Any], places: Sequence[int]
    ) -> tuple[Any, int]:
        """Return what ``collate_fn`` makes of the samples at `indices`, and how many are None.

        Each is seeded by its place: its index, or its position.
        """
        samples = self._many(step, microbatch, indices) if self._by_items else None
        if samples is None:
            samples = self._samples(step.epoch, indices, places)
        elif not isinstance(samples, list) and self.collation.collate_fn is None:
            return samples, 0  # a whole batch: PyTorch's protocol has a list of samples
        return self.collation.batch_of(samples, indices, step, microbatch)

    def _many(self, step: StepInfo, microbatch: int, indices: Sequence[Any]) -> Any:
        """Return what ``__getitems__`` returns, or None, from now on, if it drew for a share."""
        before = self.collation.fork_rng()
        self.collation.context_for("__getitems__", step, microbatch)  # seeds for a microbatch
        samples = self._call(self.dataset.__getitems__, indices)
        # How many numbers a share draws depends on the ranks. One by one each sample has a seed.
        self._by_items = self.collation.microbatches or not before.advanced()
        return samples if self._by_items else None

    def _samples(self, epoch: int, indices: Sequence[Any], places: Sequence[int]) -> list[Any]:
        """Return samples, each read with all default generators seeded for its place."""
        seeded = generators.default_generators() if self.collation.reproducible else ()
        of_epoch = mix(self.collation.seed, epoch)
        seeds = [mix(of_epoch, place) for place in places] if seeded else places
        get, samples = self.dataset.__getitem__, list[Any]()
        for index, seed in zip(indices, seeds, strict=True):
            for generator in seeded:
                generator.seed(seed)
            samples.append(self._call(get, index))
        return samples

    def _call(self, get: Callable[[Any], Any], indices: Any) -> Any:
        """Return ``get(indices)``; say where, if that raises."""
        try:
            return get(indices)
        except Exception as error:  # user code: whatever it raises
            index = as_list(indices)
            what = f"{'samples' if isinstance(index, list) else 'sample'} {index} could not be read"
            raise self.collation.failed(what, error) from error


@cache
def _number_of(user: str) -> int:
    return mix(*user.encode())
