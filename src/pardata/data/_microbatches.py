"""A rank's share of a step, as pieces whose size does not depend on the number of ranks."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, overload

_T = TypeVar("_T")


class Microbatches(Sequence[_T]):
    """This rank's microbatches of one step: what a loader with a `microbatch_size` yields.

    A sequence of what ``collate_fn`` returns for each, and empty on a rank that has none.

    Attributes:
        epoch: in which the step is.
        step: its number within the epoch.
        first: the number, within the step, of the first microbatch here.
        counts: how many samples each microbatch of the whole step has, over all ranks.
        seed: of the loader.
        size: how many ranks share the step.
        stand_in: a microbatch of the step: one of these, or, on a rank that has none, one that is
            not its own, to run where all ranks must run one and not to be counted.

    Raises:
        ValueError: for `counts` that do not cover the microbatches here.
    """

    def __init__(
        self,
        batches: Iterable[_T],
        *,
        epoch: int,
        step: int,
        first: int,
        counts: Sequence[int],
        seed: int = 0,
        size: int = 1,
        stand_in: _T | None = None,
    ) -> None:
        self._batches = tuple(batches)
        self.epoch = epoch
        self.step = step
        self.first = first
        self.counts = tuple(counts)
        if not 0 <= first <= len(self.counts) - len(self._batches):
            raise ValueError(
                f"`counts` must have a number for each microbatch of the step, over all ranks, but "
                f"has {len(self.counts)}, and here are {len(self._batches)} from number {first} "
                f"on: count those of the other ranks too"
            )
        self.seed = seed
        self.size = size
        self.stand_in = self._batches[0] if self._batches else stand_in

    def __len__(self) -> int:
        return len(self._batches)

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_T]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._batches[index]

    def __repr__(self) -> str:
        own = f"{self.first} … {self.first + len(self) - 1}" if len(self) else "none"
        return f"Microbatches(epoch={self.epoch}, step={self.step}, {own} of {len(self.counts)})"
