"""Which sample goes where: pure arithmetic, without a process group or a data set.

N samples, global batch B, world size W. Epoch e has an order of the N samples. Step k is the
positions kB … min((k+1)B, N)-1 of that order, whatever W is; each rank gets a run of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def mix(*numbers: int) -> int:
    """Hash integers into one of 63 bits; neighbours (seed, seed + 1) have nothing in common.

    SplitMix64's finaliser, once a number: Steele, Lea and Flood, "Fast Splittable Pseudorandom
    Number Generators", OOPSLA 2014.
    """
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1


def shuffled(length: int, seed: int, epoch: int) -> Sequence[int]:
    """Return the numbers 0 … `length` - 1 in the random order of this seed and epoch."""
    generator = torch.Generator().manual_seed(mix(seed, epoch))
    order: list[int] = torch.randperm(length, generator=generator).tolist()
    return order


def share(count: int, rank: int, size: int) -> range:
    """Return this rank's run of `count` things: shares differ by at most one, the first get more.

    >>> [list(share(5, rank, 3)) for rank in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    small, larger = divmod(count, size)
    start = rank * small + min(rank, larger)
    return range(start, start + small + (rank < larger))


@dataclass(frozen=True)
class Plan:
    """How the positions of an epoch become steps, and a step the shares of the ranks."""

    length: int
    batch_size: int
    drop_last: bool
    rank: int = 0
    size: int = 1

    def __len__(self) -> int:
        whole, rest = divmod(self.length, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def step(self, index: int) -> range:
        """Return the positions of the global batch of step `index`."""
        start = index * self.batch_size
        return range(start, min(start + self.batch_size, self.length))

    def share(self, index: int) -> range:
        """Return this rank's positions in step `index`; none where there are too few."""
        positions = self.step(index)
        own = share(len(positions), self.rank, self.size)
        return positions[own.start : own.stop]

    def leaves_some_empty(self, index: int) -> bool:
        """Whether step `index` has fewer samples than there are ranks."""
        return len(self.step(index)) < self.size
