"""Fetches a rank's samples of a step, in a worker or in this process: reads, seeds, collates.

Does not know other ranks: a request has the indices of this one.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from pardata.data._batched_read import batch_reader, cpu_default_device, has_getitems
from pardata.data._mixture import reading
from pardata.data._plan import FetchedStep, StepInfo
from pardata.data._sampler import FetchRequest, as_list
from pardata.rng import _rng_state as generators
from pardata.rng._seeds import mix
from pardata.store._rank_errors import RemoteError

# Steps at the start of an epoch in which a use of random numbers is detected; then one in 16.
_LOOKED_AT = 16


class Collator(NamedTuple):
    """Collates samples to a batch, seeds user functions, and adds the place to their errors.

    Attributes:
        reproducible: whether samples and user functions are seeded.
        microbatches: whether steps have microbatches. Otherwise user functions must not draw random
            numbers.
        rank: the rank of this process, for errors.
    """

    collate_fn: Callable[[list[Any]], Any] | None
    seed: int
    reproducible: bool
    microbatches: bool
    rank: int

    def fork_rng(self) -> generators.ForkedRng:
        """Return a context that restores the default generators after a step is fetched."""
        return generators.ForkedRng(generators.default_generators() if self.reproducible else ())

    def context_for(
        self, user: str, step: StepInfo, microbatch: int, device: torch.device | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of a call of the user's function for a microbatch or a local batch.

        `user` is the name of the function, and part of its seed. Without a `device` the call is
        inside `fork_rng`, which restores the generators.
        """
        if not self.reproducible:
            return nullcontext()
        if not self.microbatches:
            # Not in every step: to get NumPy's state takes longer than to read a batch from a
            # cache.
            looks = step.number < _LOOKED_AT or step.number % _LOOKED_AT == 0
            return generators.forbid_rng_use(user, device) if looks else nullcontext()
        seed = mix(self.seed, step.epoch, step.number, microbatch, mix(*user.encode()))
        if device is not None:
            return generators.fork_rng(seed, device)
        generators.seed_generators(seed)
        return nullcontext()

    def batch_of(
        self, samples: Any, indices: Any, step: StepInfo, microbatch: int
    ) -> tuple[Any, int]:
        """Return the batch, and the number of samples that are None, for ``collate_fn`` to skip."""
        if self.collate_fn is None:
            try:
                with cpu_default_device():
                    return default_collate(samples), 0
            except Exception as error:  # samples differ, or have an unknown type
                raise self.failed(f"samples {indices} could not be collated", error) from error
        with self.context_for("collate_fn", step, microbatch):
            missing = sum(sample is None for sample in samples)
            return self.call("collate_fn", self.collate_fn, samples, step), missing

    def call(self, user: str, function: Callable[[Any], Any], given: Any, step: StepInfo) -> Any:
        """Return ``function(given)``; an error names the step and the rank."""
        try:
            return function(given)
        except Exception as error:  # also a StopIteration, which would end the epoch
            what = f"`{user}` failed in step {step.number} of epoch {step.epoch}"
            raise self.failed(what, error) from error

    def failed(self, what: str, error: Exception) -> RuntimeError:
        """Return an error of `what`, the rank, the worker, and the text of `error`."""
        worker = get_worker_info()
        where = f"on rank {self.rank}" + (f", worker {worker.id}" if worker else "")
        return RuntimeError(f"{what} {where}: {type(error).__name__}: {error}")


class MapFetcher(Dataset[Any]):
    """The dataset that the loader's workers read: returns the batches of a `FetchRequest`."""

    def __init__(self, dataset: Any, collation: Collator) -> None:
        self.dataset, self.collation = dataset, collation
        self._by_items = has_getitems(dataset)
        self._epoch = -1  # the last argument of the dataset's ``set_epoch``

    def find_batch_reader(self) -> None:
        """Find the function that reads whole batches of the dataset as it is now."""
        collates = self.collation.collate_fn is not None
        self._batch_reader = None if collates else batch_reader(self.dataset)

    def __getitem__(self, request: FetchRequest) -> FetchedStep | RemoteError:
        """Return the step; a worker returns an error too, because DataLoader changes its text."""
        try:
            return self._fetched(request)
        except Exception as error:
            if get_worker_info() is None:
                raise
            return RemoteError.of(error, rank=self.collation.rank, call="a worker of the loader")
        finally:
            reading.key = None

    def _fetched(self, request: FetchRequest) -> FetchedStep:
        step, asked, positions = request
        if step.epoch != self._epoch:
            self._key = mix(self.collation.seed, step.epoch)  # takes a microsecond
        reading.key = self._key
        if step.epoch != self._epoch and hasattr(self.dataset, "set_epoch"):
            # In a worker too, which has a copy of the dataset.
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
        """Return the batch of the samples at `indices`, and the number of samples that are None.

        Each sample is seeded by its entry of `places`: its index, or its position in the epoch.
        """
        samples = self._many(step, microbatch, indices) if self._by_items else None
        if samples is None:
            samples = self._samples(step.epoch, indices, places)
        elif not isinstance(samples, list) and self.collation.collate_fn is None:
            return samples, 0  # a batch; PyTorch's protocol would be a list of samples
        return self.collation.batch_of(samples, indices, step, microbatch)

    def _many(self, step: StepInfo, microbatch: int, indices: Sequence[Any]) -> Any:
        """Return the result of ``__getitems__``; from now on None if it drew for a local batch."""
        before = self.collation.fork_rng()
        # Seeds, if there are microbatches.
        self.collation.context_for("__getitems__", step, microbatch)
        samples = self._call(self.dataset.__getitems__, indices)
        # The size of a local batch depends on the world size. One by one, each sample has a seed.
        self._by_items = self.collation.microbatches or not before.advanced()
        return samples if self._by_items else None

    def _samples(self, epoch: int, indices: Sequence[Any], places: Sequence[int]) -> list[Any]:
        """Return samples, each read with the default generators seeded by its entry of `places`."""
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
        """Return ``get(indices)``; an error names the indices and the rank."""
        try:
            return get(indices)
        except Exception as error:  # user code may raise anything
            index = as_list(indices)
            what = f"{'samples' if isinstance(index, list) else 'sample'} {index} could not be read"
            raise self.collation.failed(what, error) from error
