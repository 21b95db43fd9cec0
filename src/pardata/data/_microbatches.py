"""A rank's microbatches of one step. Their sizes do not depend on the number of ranks.

Does not move samples between ranks: the loader has divided the step.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from typing import Any, TypeVar, overload

import torch

from pardata._pytree import map_with_path
from pardata.data._batch import num_samples
from pardata.data._plan import even_ranges
from pardata.environment._world import require_world, store_client
from pardata.store._round import exchange

_T = TypeVar("_T")


class Microbatches(Sequence[_T]):
    """This rank's microbatches of one step, as a loader with a `microbatch_size` yields.

    A sequence of what ``collate_fn`` returns for each; it is empty on a rank that has none. Loaders
    make them. `Microbatches.of` makes them of batches that no loader made.

    Attributes:
        epoch: in which the step is.
        step: its number within the epoch.
        first: the number, within the step, of the first microbatch here.
        counts: how many samples each microbatch of the whole step has, over all ranks.
        seed: of the loader.
        size: number of ranks that run the step.
        ranges: the numbers of the microbatches of each rank.
        by_cost: whether the `cost` of `make_loader` decides the ranges. Otherwise their lengths
            differ by at most one.
        calls: number of calls of `backward` with it: each call draws other random numbers.
        missing: how many samples of each microbatch here ``collate_fn`` has left out as None.

    >>> from pardata import make_loader
    >>> [batch.counts for batch in make_loader(range(5), 4, microbatch_size=2)]
    [(2, 2), (1,)]
    """

    def __init__(
        self,
        batches: Iterable[_T],
        *,
        epoch: int,
        step: int,
        first: int,
        counts: Iterable[int],
        seed: int = 0,
        size: int = 1,
        ranges: Sequence[range] = (),
        by_cost: bool = False,
        placeholder: _T | None = None,
        missing: Iterable[int] = (),
    ) -> None:
        self._batches, self.counts = tuple(batches), tuple(counts)
        self.missing = tuple(missing) or (0,) * len(self._batches)
        self.epoch, self.step, self.first = epoch, step, first
        self.seed, self.size, self.calls = seed, size, 0
        self.ranges = tuple(ranges or even_ranges(len(self.counts), size))
        self.by_cost = by_cost
        self._others = placeholder

    @property
    def numbers(self) -> range:
        """The numbers, within the step, of the microbatches here."""
        return range(self.first, self.first + len(self))

    @cached_property
    def placeholder(self) -> _T | None:
        """A microbatch of the step that counts nothing, to run if all ranks must run one.

        On a rank that has no microbatch it is one of another rank's; otherwise it is a copy of the
        first one here. A `loss_fn` that keeps a state knows by ``microbatch is batch.placeholder``
        when it must not.
        """
        if not self._batches:
            return self._others
        # `copy` of a tuple would return the same object.
        copied: _T = map_with_path(self._batches[0], lambda at, leaf: leaf if at else copy(leaf))
        return copied

    @classmethod
    def of(cls, batches: Iterable[_T], *, step: int, epoch: int = 0) -> "Microbatches[_T]":
        """Return microbatches that no loader made: the local batch of a step, for `backward`.

        Within the step they are in the order of the ranks. Each rank passes the same number of
        them, at least one. `of` counts samples as `backward` does. Collective.

        Args:
            batches: of this rank, each of any kind that `backward` takes.
            step: another number in each step of the `epoch`, from which dropout draws its numbers.
            epoch: as `step`.

        Raises:
            TypeError: the number of samples of a batch is unclear.
            ValueError: ranks have none, or not equally many.

        >>> Microbatches.of([torch.ones(2, 3), torch.ones(1, 3)], step=5)
        Microbatches(epoch=0, step=5, 0 … 1 of 2)
        """
        local, world = tuple(batches), require_world("Microbatches.of")

        def state() -> dict[str, Any]:
            return {"counts": [num_samples(batch) for batch in local], "seed": torch.initial_seed()}

        def decide(facts: list[dict[str, Any]]) -> tuple[list[int], int]:
            by_rank = [one["counts"] for one in facts]
            numbers = [*map(len, by_rank)]
            if min(numbers) == 0 or min(numbers) < max(numbers):
                msg = f"every rank must pass as many `batches`, at least one, but pass {numbers}"
                raise ValueError(msg)
            return [count for one in by_rank for count in one], facts[0]["seed"]

        counts, seed = exchange(store_client(world), "Microbatches.of", state, decide)
        where: dict[str, Any] = {"epoch": epoch, "step": step, "first": world.rank * len(local)}
        return cls(local, **where, counts=counts, seed=seed, size=world.size)

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_T]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]

    def __repr__(self) -> str:
        shown = f"{self.first} … {self.numbers[-1]}" if len(self) else "none"
        return f"Microbatches(epoch={self.epoch}, step={self.step}, {shown} of {len(self.counts)})"
