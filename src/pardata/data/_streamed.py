"""The steps of a stream: alike in every worker, and ending at the same one on every rank."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from pardata.collective._agreement import agree, require_same
from pardata.collective._explanation import explained
from pardata.data._reader import Fetched
from pardata.data._stream import Stream, not_of_this_stream
from pardata.data._workers import Source
from pardata.ranks._table import ranks_text
from pardata.ranks._world import World, way_of_counts


class Streamed(Source):
    """The steps of a stream: they end when all `ranks`, if there are others, are at their end."""

    def __init__(self, stream: Stream, ranks: World | None, **options: Any) -> None:
        super().__init__(stream, None, **options)
        self._ranks = ranks

    def steps(self, epoch: int, delivered: int) -> Iterator[Fetched]:
        """Yield the steps after those delivered. Collective, at each step, if there are ranks."""
        stream: Stream = self.reader
        batch_size = stream.plan.batch_size
        first = -(-delivered // batch_size)
        # Of streams that differ only reading again tells which worker delivered how much of its.
        again = first if stream.is_sharded else 0
        stream.start_at(epoch, 0 if again else delivered)
        fetched = self._begun(epoch, lambda: iter(stream))
        if not stream.is_sharded:
            fetched = _alike(fetched, first)
        if self._ranks is not None:
            fetched = _together(fetched, self._ranks, stream)
        return _after(fetched, again, batch_size) if again else fetched


def _alike(fetched: Iterator[Fetched], first: int) -> Iterator[Fetched]:
    """Yield the steps, from number `first` on, of a stream that every worker reads whole.

    Raises:
        RuntimeError: where workers did not read the same.
    """
    digest, most = None, 0
    for number, current in enumerate(fetched, first):
        # A short step is a tail, after which nothing follows.
        follows = digest is None or (current.digest == digest and current.step.samples <= most)
        if current.step.number != number or not follows:
            raise RuntimeError(
                "every worker must read the same stream, but they differ: let it not look at "
                "get_worker_info(), and draw from the default generators alone, or pass "
                "sharded=True if each rank and worker has its own"
            )
        digest, most = current.digest, current.step.samples
        yield current


def _together(own: Iterator[Fetched], here: World, stream: Stream) -> Iterator[Fetched]:
    """Yield this rank's `own` steps, and imitate the last of them where only others have one left.

    Collective, without waiting at a step for that step: ranks tell each other what they have for
    the next one while this one is computed.

    Raises:
        RuntimeError: where a data set that all ranks read whole is not the same on each or ends at
            different steps, or a rank has nothing at all; on every rank. So does an error that
            `own` raises.
    """
    last: Any = None  # no step yet
    coming = _Coming(own, here)
    while True:
        failed, have, samples, squares = coming.sums()
        if failed:
            coming.raise_on_all()
        if not have or (have < here.size and stream.is_sharded and stream.plan.drop_last):
            return
        # Numbers are all equal exactly if their mean square is the square of their mean.
        if not stream.is_sharded and here.size * squares != samples**2:
            coming.raise_of_ends()
        if last is None:
            coming.check_first(here.size - have, sharded=stream.is_sharded)
        # Of the shape of this rank's last step, without rows: at the first step all have one.
        last = coming.fetched or last._replace(step=last.step._replace(rows=0))
        coming = _Coming(own, here)
        yield last


class _Coming:
    """The next step of this rank, if there is one, or the error that it ended in.

    How many ranks have one is summed while the step before runs.
    """

    def __init__(self, own: Iterator[Fetched], here: World) -> None:
        self._here = here
        self.fetched: Fetched | None = None
        self._error: Exception | None = None
        try:
            self.fetched = next(own, None)
        except Exception as error:  # noqa: BLE001  # raised again, on every rank
            self._error = error
        self._samples = 0 if self.fetched is None else self.fetched.step.samples
        has = self.fetched is not None
        counts = [self._error is not None, has, self._samples, self._samples**2]
        group, device = way_of_counts(here)
        self._sums = torch.tensor(counts, dtype=torch.int64, device=device)
        self._work: Any = dist.all_reduce(self._sums, group=group, async_op=True)

    def sums(self) -> list[int]:
        """Return how many failed, how many have one, and their samples and squares of those."""
        with explained("the next step of an IterableDataset"):
            self._work.wait()
        sums: list[int] = self._sums.tolist()
        return sums

    def raise_on_all(self) -> None:
        """Raise an error of any rank on all. Collective."""

        def failed() -> dict[str, object]:
            error, self._error = self._error, None  # it holds frames that hold this
            if error is not None:
                raise error
            return {}

        agree(self._here, "the next step of an IterableDataset", failed)

    def raise_of_ends(self) -> None:
        """Raise, and say which ranks have fewer samples for this step than others. Collective."""
        own = {"samples": self._samples}
        told = agree(self._here, "the end of an IterableDataset", lambda: own)
        counts: list[Any] = [facts["samples"] for facts in told]
        shorter = ranks_text([rank for rank, count in enumerate(counts) if count < max(counts)])
        raise RuntimeError(
            f"every rank must read the same stream, but it ended on {shorter} of "
            f"{self._here.size} before the others: let it yield the same samples everywhere, "
            f"drawing from the default generators alone, or pass sharded=True if each rank has "
            f"its own"
        )

    def check_first(self, without: int, *, sharded: bool) -> None:
        """Raise where ranks have nothing at all, or did not read the same. Collective."""
        if without:
            raise RuntimeError(
                f"every rank must have a sample, but {without} of {self._here.size} have none at "
                f"all: let the data set yield some on each, or pass sharded=False"
            )
        if sharded or self.fetched is None:
            return
        own = {"first samples": self.fetched.digest}
        told = agree(self._here, "iter(loader) of an IterableDataset", lambda: own)
        cure = (
            "Let the stream yield the same samples everywhere, drawing from the default generators "
            "alone, or pass sharded=True if each rank and worker has its own."
        )
        require_same("make_loader(IterableDataset)", told, cure)


def _after(fetched: Iterator[Fetched], again: int, batch_size: int) -> Iterator[Fetched]:
    """Yield what comes after the first `again` steps, which have been delivered."""
    for count in range(again):
        if next(fetched, None) is None:  # on every rank: they end together
            why = f"on some rank it ended after {count} of {again} steps"
            raise not_of_this_stream(again * batch_size, why)
    yield from fetched
