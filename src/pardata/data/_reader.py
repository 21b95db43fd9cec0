"""Reading a rank's part of a step, in a worker or here: seeded, collated, and errors say where."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from pardata.collective._tree import digest_of
from pardata.data._batch import is_read_whole, whole_batch_reader
from pardata.data._order import Request, as_list
from pardata.data._plan import Step
from pardata.ranks._logger import get_logger
from pardata.seeds import _generators as generators
from pardata.seeds._mix import mix

_log = get_logger(__name__)

_THOROUGH_EACH = 16  # steps: looking at every generator takes as long as a small batch


class Fetched(NamedTuple):
    """What was read of one step; a named tuple, which ``DataLoader`` pins field by field."""

    step: Step
    batches: list[Any]  # one for each microbatch, or that of the whole share
    digest: str = ""  # of a stream: a hash of what its reader read first in this epoch
    state: Any = None  # of a stream that has one: its own, after this step


class Seeds(NamedTuple):
    """From where randomness comes: `reproducible` seeds each sample and each microbatch."""

    seed: int
    reproducible: bool
    microbatches: bool

    def around_reading(self) -> AbstractContextManager[None]:
        """Return the context in which the samples of a step are read and collated."""
        return generators.kept_generators() if self.reproducible else nullcontext()

    def around(
        self, user: str, step: Step, microbatch: int, device: torch.device | None = None
    ) -> AbstractContextManager[None]:
        """Return the context in which `user` sees one microbatch, or one rank's share.

        A `user` is an argument or a method, by its name: each draws other numbers. Without a
        `device` it is within `around_reading`, which puts the generators back.
        """
        if not self.reproducible:
            return nullcontext()
        if self.microbatches:
            place = step.epoch, step.number, microbatch
            seed = mix(self.seed, *place, *user.encode())
            if device is not None:
                return generators.forked_seed(seed, device)
            generators.seed_generators(seed)
            return nullcontext()
        return generators.no_draws(user, device, thorough=step.number % _THOROUGH_EACH == 0)


class Collation(NamedTuple):
    """How samples that were read become a batch, and what is said of those that cannot be read."""

    collate_fn: Callable[[list[Any]], Any] | None
    seeds: Seeds
    rank: int  # of this process, also where nothing is shared out

    def batch_of(self, samples: Any, step: Step, microbatch: int) -> Any:
        if self.collate_fn is None:
            return default_collate(samples)
        with self.seeds.around("collate_fn", step, microbatch):
            return self.collate_fn(samples)

    def unreadable(self, what: str, error: Exception) -> RuntimeError:
        """Return the error that says what could not be read, where, and what happened."""
        worker = get_worker_info()
        where = f"on rank {self.rank}" + (f", worker {worker.id}" if worker else "")
        return RuntimeError(f"{what} could not be read {where}: {type(error).__name__}: {error}")


class Reader(Dataset[Any]):
    """A dataset as the loader's workers see it: asked for a `Request`, it returns batches."""

    def __init__(self, dataset: Any, collation: Collation) -> None:
        self.dataset, self.collation = dataset, collation
        self._seeds = seeds = collation.seeds
        plainly = collation.collate_fn is None
        self._read_whole = whole_batch_reader(dataset) if plainly else None
        # A Subset has __getitems__ whatever it is of, and would read one by one itself.
        self._by_items = hasattr(dataset, "__getitems__") and is_read_whole(dataset)
        per_sample = self._read_whole is None and not self._by_items
        # Shared, so that workers which are started anew for each epoch look only once.
        self._looks_twice = torch.tensor(seeds.reproducible and per_sample and collation.rank == 0)
        self._looks_twice.share_memory_()
        # The generators that the dataset has been seen using.
        self._drawn_from: list[generators.Default] = []
        self._epoch = -1  # that the dataset was told

    def __getitem__(self, request: Request) -> Fetched:
        """Return what is asked for."""
        step, asked = request
        if step.epoch != self._epoch:
            self._tell(step.epoch)
        if (read := self._read_whole) is not None:
            return Fetched(step, [self._got(read, torch.as_tensor(each)) for each in asked])
        if self._looks_twice:
            self._warn_of_a_generator_of_its_own(request)
        with self._seeds.around_reading():
            numbered = enumerate(asked, step.first)
            batches = [self._batch(step, number, as_list(own)) for number, own in numbered]
        return Fetched(step, batches)

    def _tell(self, epoch: int) -> None:
        """Tell the dataset the epoch, if it asks for that: a worker has a copy of its own."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._epoch = epoch

    def _batch(self, step: Step, microbatch: int, indices: Sequence[Any]) -> Any:
        """Return what ``collate_fn`` makes of the samples at `indices`."""
        if self._by_items:
            with self._seeds.around("__getitems__", step, microbatch):
                samples = self._got(self.dataset.__getitems__, indices)
            if not isinstance(samples, list) and self.collation.collate_fn is None:
                return samples  # a whole batch: PyTorch's protocol has a list of samples
        else:
            samples = self._samples(step.epoch, indices)
        return self.collation.batch_of(samples, step, microbatch)

    def _samples(self, epoch: int, indices: Sequence[Any]) -> list[Any]:
        """Return samples, each read with the generators seeded for it.

        Those that the dataset has never drawn from are left alone, which saves most of the time;
        where it has now drawn from one of them, all is read again.
        """
        left_alone = generators.default_generators() if self._seeds.reproducible else ()
        while True:
            left_alone = tuple(own for own in left_alone if own not in self._drawn_from)
            states = generators.states_of(left_alone)
            samples = [self._sample(epoch, index) for index in indices]
            if not (drawn := generators.moved(states)):
                return samples
            self._drawn_from += drawn

    def _sample(self, epoch: int, index: Any) -> Any:
        if self._drawn_from:
            own = [index] if isinstance(index, int) else repr(index).encode()
            seed = mix(mix(self._seeds.seed, epoch), *own)
            generators.seed_generators(seed, among=self._drawn_from)
        return self._got(self.dataset.__getitem__, index)

    def _got(self, get: Callable[[Any], Any], index: Any) -> Any:
        """Return ``get(index)``; say where, if that raises."""
        try:
            return get(index)
        except Exception as error:  # user code: whatever it raises
            many = isinstance(index, Sequence | Tensor)
            what = f"{'samples' if many else 'sample'} {as_list(index)}"
            raise self.collation.unreadable(what, error) from error

    def _warn_of_a_generator_of_its_own(self, request: Request) -> None:
        """Read one sample twice under one seed: what differs is not reproducible."""
        worker = get_worker_info()
        first = next((as_list(some[:1]) for some in request.indices if len(some)), None)
        if first is None or (worker and worker.id):
            return
        self._looks_twice.fill_(False)
        text = (
            "sample %s of %s differs when read twice with the same seed, so that runs at other "
            "sizes will not be the same: draw from the default generators of Python, NumPy or "
            "PyTorch, or pass reproducible=False"
        )
        # A user's objects may raise anything: this is advice, and must not end a run.
        with generators.kept_generators(), suppress(Exception):
            one, other = (digest_of(self._samples(request.step.epoch, first)) for _ in range(2))
            if one != other:
                _log.warning(text, first[0], type(self.dataset).__name__)
