"""Which sample goes where: pure arithmetic, without a process group or a dataset.

N samples, global batch B, world size W. Epoch e has an order of the N samples. Step k is the
positions kB … min((k+1)B, N)-1 of that order, whatever W is; each rank gets a run of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


def local_range(count: int, rank: int, size: int) -> range:
    """Return this rank's run of `count` things; shares differ by at most one.

    Two or four ranks have a half or a quarter, as the sum of an exact step is made of halves.

    >>> [list(share(5, rank, 3)) for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    return range(-(-rank * count // size), -(-(rank + 1) * count // size))


class StepInfo(NamedTuple):
    """One step, as one rank sees it."""

    epoch: int
    number: int  # within the epoch
    first: int  # the number, within the step, of this rank's first microbatch, else 0
    local_samples: int  # samples of this rank; if it has none, it reads a placeholder
    samples: int  # samples of the whole step, over all ranks


class FetchedStep(NamedTuple):
    """What was read of one step; a named tuple, which ``DataLoader`` pins field by field."""

    step: StepInfo
    batches: list[Any]  # one for each microbatch, or that of the whole share
    digest: str = ""  # if a stream: a hash of what its reader read first in this epoch
    state: Any = None  # the dataset's own after this step, if it is a stream that has one
    missing: Sequence[int] = ()  # how many samples of each batch are None


@dataclass(eq=False)
class Plan:
    """How the positions of an epoch become steps, and a step the shares of the ranks.

    With a `microbatch_size` a step is cut into microbatches, of which the last may be short. A
    share is then a run of whole ones. Otherwise it is one run of samples. A stream may have no
    `length`. A sampler's length replaces the dataset's in each epoch. A ``batch_sampler`` has its
    own steps: then `batch_size` is 0. Step 0 begins at position `start`, which is above 0 only in
    an epoch that is resumed with another batch size.
    """

    length: int | None
    batch_size: int
    drop_last: bool
    microbatch_size: int | None = None
    rank: int = 0
    size: int = 1
    start: int = 0

    def __len__(self) -> int:
        # Callers have a length and a batch size.
        full, rest = divmod((self.length or 0) - self.start, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __getitem__(self, number: int) -> range:
        """Return the positions of the global batch of step `number`."""
        start = self.start + number * self.batch_size
        return range(self.length or 0)[start : start + self.batch_size]

    def check(self, *, shuffled: bool) -> None:
        """Raise if no step is left, or a shuffled one leaves a rank without a sample."""
        length = self.length or 0
        if self.drop_last and self.batch_size > length:
            raise ValueError(
                f"`batch_size` must be at most the {length} samples of an epoch with drop_last, "
                f"but is {self.batch_size}: make it smaller, or pass drop_last=False"
            )
        rest = (length - self.start) % self.batch_size
        last = 0 if self.drop_last or self.microbatch_size else rest
        if shuffled and 0 < last < self.size:
            raise ValueError(
                f"the last batch must have a sample for each of the {self.size} ranks, but has "
                f"{last} of {length}: pass drop_last=True, `microbatch_size` or another batch_size"
            )

    def local_ranges(
        self, samples: int, epoch: int = 0, number: int = 0
    ) -> tuple[StepInfo, list[range]]:
        """Return a step of so many samples, and this rank's runs of them, one a microbatch.

        If it has none, it reads a placeholder. That is the step's first microbatch, to be run if
        all ranks must run one, or the first sample, whose shape an empty batch takes.
        """
        first, runs = 0, [local_range(samples, self.rank, self.size)]
        if (size := self.microbatch_size) is not None:
            numbers = local_range(-(-samples // size), self.rank, self.size)
            first = numbers.start
            runs = [range(samples)[n * size : (n + 1) * size] for n in numbers]
        local_samples = sum(map(len, runs))
        runs = runs if local_samples else [range(samples)[: self.microbatch_size or 1]]
        return StepInfo(epoch, number, first, local_samples, samples), runs

    def microbatch_sizes(self, samples: int) -> tuple[int, ...]:
        """Return how many samples each microbatch of a step of so many has, over all ranks."""
        size = self.microbatch_size or samples
        return (size,) * (samples // size) + ((samples % size,) if samples % size else ())
