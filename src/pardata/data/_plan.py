"""Which sample goes where: pure arithmetic, without a process group or a data set.

N samples, global batch B, world size W. Epoch e has an order of the N samples. Step k is the
positions kB … min((k+1)B, N)-1 of that order, whatever W is; each rank gets a run of them.
"""

from dataclasses import dataclass


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
    """How the positions of an epoch become steps, and a step the shares of the ranks.

    With a `microbatch_size` a step is cut into microbatches, of which the last may be short, and a
    share is a run of whole ones; without, it is one run of samples.
    """

    length: int
    batch_size: int
    drop_last: bool
    microbatch_size: int | None = None
    rank: int = 0
    size: int = 1

    def __len__(self) -> int:
        whole, rest = divmod(self.length, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def step(self, index: int) -> range:
        """Return the positions of the global batch of step `index`."""
        start = index * self.batch_size
        return range(start, min(start + self.batch_size, self.length))

    def parts(self, index: int) -> list[range]:
        """Return this rank's positions in step `index`, one run a microbatch.

        Without microbatches that is one run, which is empty where there are too few samples.
        """
        positions = self.step(index)
        if self.microbatch_size is None:
            own = share(len(positions), self.rank, self.size)
            return [positions[own.start : own.stop]]
        return [self._microbatch(positions, number) for number in self.microbatches(index)]

    def stand_in(self, index: int) -> range:
        """Return what a rank reads that has no samples in step `index`.

        The first microbatch of the step, to be run where all ranks must run one; or the first
        sample, whose shape an empty batch takes.
        """
        return self.step(index)[: self.microbatch_size or 1]

    def microbatches(self, index: int) -> range:
        """Return the numbers, within step `index`, of this rank's microbatches; of a share, 0."""
        if self.microbatch_size is None:
            return range(1)
        return share(len(self.counts(index)), self.rank, self.size)

    def counts(self, index: int) -> tuple[int, ...]:
        """Return how many samples each microbatch of step `index` has, over all ranks."""
        positions = self.step(index)
        size = self.microbatch_size or self.batch_size
        whole, rest = divmod(len(positions), size)
        return (size,) * whole + ((rest,) if rest else ())

    def _microbatch(self, positions: range, number: int) -> range:
        size = self.microbatch_size or self.batch_size
        return positions[number * size : (number + 1) * size]
