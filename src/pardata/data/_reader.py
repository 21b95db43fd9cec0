"""Reading a rank's part of a step, in a worker or here: seeded, collated, and errors say where."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from pardata.data._sameness import same
from pardata.data._whole_batches import Indices, is_read_whole, whole_batch_reader
from pardata.ranks._logger import get_logger
from pardata.seeds._generators import (
    Default,
    default_generators,
    forked_seed,
    kept_generators,
    no_draws,
    seed_generators,
)
from pardata.seeds._mix import mix

_log = get_logger(__name__)

_THOROUGH_EACH = 16  # steps: looking at every generator takes as long as a small batch


class User(Enum):
    """Who may draw random numbers for a microbatch: each draws others."""

    COLLATE_FN = "collate_fn"
    BATCH_TRANSFORM = "batch_transform"
    GETITEMS = "__getitems__"


@dataclass(frozen=True)
class Request:
    """What one rank reads for one step: the indices of each microbatch, or of its whole share."""

    epoch: int
    step: int
    first: int
    parts: list[Indices]
    counts: tuple[int, ...]
    rows: int


class Fetched(NamedTuple):
    """What was read of one step; a named tuple, which ``DataLoader`` pins part by part."""

    epoch: int
    step: int
    first: int
    parts: list[Any]
    counts: tuple[int, ...]  # samples of each microbatch of the whole step, over all ranks
    rows: int  # samples of this rank; of none, `parts` holds what stands in for them
    read: str = ""  # of a stream: a hash of what its reader read first


@dataclass(frozen=True)
class Seeds:
    """From where randomness comes: `reproducible` seeds each sample and each microbatch."""

    seed: int
    reproducible: bool
    microbatches: bool

    def of_samples(self, epoch: int) -> Callable[[Any], int]:
        """Return what gives the seed of each sample from its index."""
        key = mix(self.seed, epoch)
        # A sampler may yield indices of any kind.
        return lambda index: mix(
            key, *([index] if isinstance(index, int) else repr(index).encode())
        )

    def around_part(
        self, user: "User", epoch: int, step: int, number: int, device: torch.device | None = None
    ) -> AbstractContextManager[None]:
        """Return the context in which `user` sees one microbatch, or one rank's share."""
        if not self.reproducible:
            return nullcontext()
        if self.microbatches:
            return forked_seed(mix(self.seed, epoch, step, number, *user.value.encode()), device)
        return no_draws(user.value, device, thorough=step % _THOROUGH_EACH == 0)


class StandsForDataset:
    """Stands for its `dataset` where a ``worker_init_fn`` finds it: at ``get_worker_info()``.

    Set `dataset` last: from then on other attributes are read from it, and new ones set there.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "dataset" in self.__dict__ and name not in self.__dict__:
            setattr(self.dataset, name, value)
        else:
            super().__setattr__(name, value)


class Reader(StandsForDataset, Dataset[Any]):
    """A data set as the loader's workers see it: asked for a `Request`, it returns batches."""

    def __init__(
        self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, seeds: Seeds, rank: int
    ) -> None:
        self._collate = collate_fn
        self._seeds = seeds
        self._rank = rank
        self._read_whole = whole_batch_reader(dataset) if collate_fn is None else None
        # A Subset has __getitems__ whatever it is of, and would read one by one itself.
        self._by_items = hasattr(dataset, "__getitems__") and is_read_whole(dataset)
        per_sample = self._read_whole is None and not self._by_items
        # Shared, so that workers which are started anew for each epoch look only once.
        self._looks_twice = torch.tensor(seeds.reproducible and per_sample and rank == 0)
        self._looks_twice.share_memory_()
        self._drawn_from: list[Default] = []  # the generators that the data set has been seen using
        self.dataset = dataset

    def __getitem__(self, request: Request) -> Fetched:
        """Return the batch of each part of the request."""
        if self._looks_twice:
            self._warn_of_a_generator_of_its_own(request)
        seeded = self._read_whole is None and self._seeds.reproducible
        with kept_generators() if seeded else nullcontext():
            parts = [
                self._part(request, number, indices)
                for number, indices in enumerate(request.parts, request.first)
            ]
        return Fetched(
            request.epoch, request.step, request.first, parts, request.counts, request.rows
        )

    def _part(self, request: Request, number: int, indices: Indices) -> Any:
        if self._read_whole is not None:
            return self._said(self._read_whole, torch.as_tensor(indices))
        indices = indices.tolist() if isinstance(indices, Tensor) else indices
        if self._by_items:
            with self._around(User.GETITEMS, request, number):
                samples = self._said(self.dataset.__getitems__, indices)
            if not isinstance(samples, list) and self._collate is None:
                return samples  # a whole batch: PyTorch's protocol has a list of samples
        else:
            samples = self._samples(request.epoch, indices)
        if self._collate is None:
            return default_collate(samples)
        with self._around(User.COLLATE_FN, request, number):
            return self._collate(samples)

    def _samples(self, epoch: int, indices: Sequence[Any]) -> list[Any]:
        """Return samples, each read with the generators seeded for it.

        Those that the data set has never drawn from are left alone, which saves most of the time;
        where it has now drawn from one of them, all is read again.
        """
        seed_of = self._seeds.of_samples(epoch)
        left_alone = default_generators() if self._seeds.reproducible else ()
        while True:
            left_alone = tuple(own for own in left_alone if own not in self._drawn_from)
            states = [(own, own.state()) for own in left_alone]
            samples = [self._sample(index, seed_of) for index in indices]
            drawn = [own for own, state in states if own.moved_since(state)]
            if not drawn:
                return samples
            self._drawn_from += drawn

    def _sample(self, index: Any, seed_of: Callable[[Any], int]) -> Any:
        if self._drawn_from:
            seed_generators(seed_of(index), among=self._drawn_from)
        return self._said(self.dataset.__getitem__, index)

    def _around(self, user: User, request: Request, number: int) -> AbstractContextManager[None]:
        return self._seeds.around_part(user, request.epoch, request.step, number)

    def _said(self, get: Callable[[Any], Any], index: Any) -> Any:
        try:
            return get(index)
        except Exception as error:  # user code: whatever it raises, say where
            many = isinstance(index, Sequence | Tensor)
            numbers = index.tolist() if isinstance(index, Tensor) else index
            what = f"{'samples' if many else 'sample'} {numbers}"
            raise unreadable(what, self._rank, error) from error

    def _warn_of_a_generator_of_its_own(self, request: Request) -> None:
        """Read one sample twice under one seed: what differs is not reproducible."""
        worker = get_worker_info()
        first = next((indices[0] for indices in request.parts if len(indices)), None)
        if first is None or (worker and worker.id):
            return
        self._looks_twice.fill_(False)
        index = first.item() if isinstance(first, Tensor) else first
        with kept_generators():
            (one,), (other,) = (self._samples(request.epoch, [index]) for _ in range(2))
        if not same(one, other):
            _log.warning(
                "sample %s of %s differs when read twice with the same seed, so that runs at "
                "other sizes will not be the same: draw from the default generators of Python, "
                "NumPy or PyTorch, or pass reproducible=False",
                index,
                type(self.dataset).__name__,
            )


def unreadable(what: str, rank: int, error: Exception) -> RuntimeError:
    """Return the error that says what could not be read, where, and what happened."""
    worker = get_worker_info()
    where = f"on rank {rank}" + (f", worker {worker.id}" if worker else "")
    return RuntimeError(f"{what} could not be read {where}: {type(error).__name__}: {error}")
