"""What the ranks tell each other at the end of an exact step, in one message."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.gradient import _fixed_point


class Sameness:
    """Asks all ranks, while a step begins, whether they are to send the same. Collective.

    For gloo ends a process that is sent more or less than it expects.
    """

    def __init__(self, key: int, device: torch.device, size: int) -> None:
        self._told = torch.tensor([key, -key], device=device)
        self._work: Any = None
        if size > 1:
            self._work = dist.all_reduce(self._told, dist.ReduceOp.MAX, async_op=True)
        self._answer: bool | None = None

    def holds(self) -> bool:
        """Return whether all have the same `key`."""
        if self._answer is None:
            if self._work is not None:
                self._work.wait()
            highest, lowest = self._told.tolist()
            self._answer = highest == -lowest
        return self._answer


class Largest:
    """The largest magnitude of what was seen in a microbatch, under each of some names."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self.names = list(names)
        self._index = {name: index for index, name in enumerate(self.names)}
        self._now = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.most = torch.zeros_like(self._now)

    def see(self, name: str, numbers: Tensor) -> Tensor:
        """Return the largest of numbers that are added and others seen in this microbatch."""
        # Their sum is no larger than the sum of what is largest in each.
        now = self._now[self._index[name]]
        now += _fixed_point.largest(numbers)
        return now

    def end(self) -> None:
        """End a microbatch."""
        self.most = torch.maximum(self.most, self._now)  # NaN if either is
        self._now.zero_()


@dataclass(frozen=True)
class Report:
    """Of all ranks together.

    Attributes:
        overflow: what could not be added, and the largest of it, by name.
        large: what needs high words.
        used: which parameters have had a gradient.
        sparse: which had a sparse one.
        late: of each bucket, whether something was left when it had been sent.
        first: the number of the first microbatch that counts.
        failed: whether a rank ended in an error.
    """

    overflow: dict[str, float]
    large: set[str]
    used: set[str]
    sparse: set[str]
    late: list[bool]
    first: int
    failed: bool

    @classmethod
    def exchanged(
        cls,
        largest: Largest,
        used: set[str],
        sparse: set[str],
        late: list[bool],
        *,
        first: int,
        failed: bool,
        size: int,
    ) -> "Report":
        """Tell the others, and return what all say. Collective: a maximum of each number."""
        names, most = largest.names, largest.most
        # The maximum of NaN and a number is not NaN with every backend.
        columns = [
            torch.nan_to_num(most, nan=0.0, posinf=torch.inf),
            most.isnan().double(),
            *(most.new_tensor([name in found for name in names]) for found in (used, sparse)),
            most.new_tensor([*late, failed, -first]),
        ]
        table = torch.cat(columns)
        if size > 1:
            dist.all_reduce(table, dist.ReduceOp.MAX)
        numbers = table.tolist()
        count = len(names)
        worst = dict(zip(names, numbers, strict=False))
        is_nan, all_used, all_sparse = (
            {name for name, flag in zip(names, numbers[start:], strict=False) if flag}
            for start in (count, 2 * count, 3 * count)
        )
        *all_late, any_failed, minus_first = numbers[4 * count :]
        return cls(
            {
                name: float("nan") if name in is_nan else value
                for name, value in worst.items()
                if name in is_nan or value > _fixed_point.LARGEST
            },
            {name for name, value in worst.items() if value > _fixed_point.SMALL},
            all_used,
            all_sparse,
            [bool(flag) for flag in all_late],
            int(-minus_first),
            bool(any_failed),
        )
