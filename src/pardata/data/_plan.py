"""The positions of each step, and of each rank in a step: arithmetic, without group or dataset.

N samples, global batch B, world size W. Epoch e has an order of the N samples. Step k is the
positions kB … min((k+1)B, N)-1 of that order, for every W. Each rank gets a contiguous range of
them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


def local_range(count: int, rank: int, size: int) -> range:
    """Return this rank's contiguous range of ``range(count)``; lengths differ by at most one.

    It ends at ceil((rank + 1) * count / size). So on 2 and 4 ranks each range is a subtree of the
    reduction tree of ``"exact"``.

    >>> [list(local_range(5, rank, 3)) for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    return range(-(-rank * count // size), -(-(rank + 1) * count // size))


class StepInfo(NamedTuple):
    """A step as one rank sees it."""

    epoch: int
    number: int  # number within the epoch
    first: int  # number within the step of this rank's first microbatch, else 0
    local_samples: int  # samples of this rank; with 0 it reads a placeholder
    samples: int  # samples of the step over all ranks


class FetchedStep(NamedTuple):
    """The collated batches of one step; a NamedTuple, because ``DataLoader`` pins its fields."""

    step: StepInfo
    batches: list[Any]  # one for each microbatch, or one for the share of the rank
    digest: str = ""  # hash of the first samples that a stream's reader read in this epoch
    state: Any = None  # the dataset's state after this step, of a stateful stream
    missing: Sequence[int] = ()  # the number of samples of each batch that are None


@dataclass(eq=False)
class Plan:
    """Divides the positions of an epoch into steps, and each step into shares of the ranks.

    With a `microbatch_size` a step is divided into microbatches, of which the last may be short,
    and a share is a range of microbatches. Otherwise a share is a range of samples. A stream may
    have no `length`. A sampler's length replaces the dataset's in each epoch. With a
    ``batch_sampler``, which makes the steps, `batch_size` is 0. Step 0 begins at position `start`,
    which is above 0 only in an epoch that is resumed with another batch size.
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
        """Raise if there is no step, or the last shuffled one leaves a rank without a sample."""
        length = self.length or 0
        if self.drop_last and self.batch_size > length:
            msg = f"`batch_size` must be at most {length} with drop_last, but is {self.batch_size}"
            raise ValueError(msg)
        if shuffled and 0 < self.rest < self.size:
            msg = "the last batch must have one sample a rank,"
            raise ValueError(f"{msg} but has {self.rest}: pass drop_last=True")

    @property
    def rest(self) -> int:
        """The samples of an incomplete last batch, if there is one and ranks share its samples."""
        is_kept = self.length and self.batch_size and not (self.drop_last or self.microbatch_size)
        return ((self.length or 0) - self.start) % self.batch_size if is_kept else 0

    def local_ranges(
        self, samples: int, epoch: int = 0, number: int = 0
    ) -> tuple[StepInfo, list[range]]:
        """Return a step of `samples` samples, and this rank's ranges of them, one a microbatch.

        A rank without samples reads a placeholder. With microbatches it is the first one of the
        step, in case all ranks must run one. Otherwise it is the first sample, which gives an empty
        batch its shape.
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
        """Return the sizes of all microbatches of a step of `samples` samples, over all ranks."""
        size = self.microbatch_size or samples
        return (size,) * (samples // size) + ((samples % size,) if samples % size else ())
