"""The steps of a stream: they begin alike and end at the same one on every rank."""

from collections.abc import Iterator
from typing import Any

from pardata._pytree import content_hash
from pardata.collectives._fingerprint import CheckedCollective
from pardata.data._plan import Fetched
from pardata.data._position import Position
from pardata.data._stream import Stream
from pardata.data._workers import Source
from pardata.environment._world import store_client
from pardata.store._consensus import raise_if_different
from pardata.store._rank_format import format_ranks
from pardata.store._round import exchange

_NEXT = "the next step of an IterableDataset"


class Streamed(Source):
    """The steps of a stream: they end when all ranks are at their end."""

    _has_yielded = False  # in any epoch

    def steps(self, start: Position) -> Iterator[Fetched]:
        """Yield the steps after those delivered. Collective, at each step, if there are ranks."""
        stream: Stream = self.reader
        state = start.state if stream.keeps_place else None
        if state is not None:
            self.renew_workers()
        stream.start_at(start.epoch, start.delivered, state)
        fetched = self._begun(start.epoch, lambda: iter(stream))
        # One that resumes from its own state does not begin anew.
        before = None if state is not None else start.digest
        shared = self._together if self._ranks.size > 1 else self._alone
        return self._after(shared(fetched, before), start, reads_again=state is None)

    def _after(
        self, steps: Iterator[Fetched], start: Position, *, reads_again: bool
    ) -> Iterator[Fetched]:
        """Yield what comes after the steps that have been delivered, if those are read again.

        Raises:
            ValueError: they have another number of samples.
            RuntimeError: the epoch has no step, on every rank, although one before had some.
        """
        number = read = 0
        while reads_again and read < start.delivered and (passed := next(steps, None)) is not None:
            number, read = number + 1, read + passed.step.samples
        if reads_again and read != start.delivered:
            raise ValueError(
                f"`state` must be of this iterable dataset, but its `delivered` is "
                f"{start.delivered} samples, and the first {number} steps have {read}: pass the "
                f"dataset that the state was taken of, or look at what was saved"
            )
        is_empty = not start.delivered
        for current in steps:
            is_empty, self._has_yielded = False, True
            yield current
        if is_empty and self._has_yielded:
            kind = type(self.reader.dataset).__name__
            raise RuntimeError(
                f"`dataset` must yield its samples in each epoch, but {kind} yielded none in epoch "
                f"{start.epoch}, after it had yielded some: let its __iter__ return a new iterator "
                f"each time, and not one that is used up"
            )

    def _alone(self, steps: Iterator[Fetched], before: str | None) -> Iterator[Fetched]:
        """Yield the steps of a rank that is alone, and compare the first with `before`."""
        for number, current in enumerate(steps):
            if number == 0:
                self._compare(current, before)
            yield current

    def _together(self, steps: Iterator[Fetched], before: str | None) -> Iterator[Fetched]:
        """Yield this rank's `steps`. If only others have one left, repeat the last without rows.

        Collective, without waiting at a step for that step: ranks tell each other what they have
        for the next one while this one is computed.

        Raises:
            RuntimeError: where a dataset that all ranks read whole ends at different steps, or a
                rank has nothing at all; on every rank. So does an error that `steps` raises.
        """
        stream = self.reader
        last: Any = None  # no step yet
        coming = _Coming(steps)
        while True:
            (fewest, most), (_, any_failed) = coming.counts()
            is_over = not most or (not fewest and stream.is_sharded and stream.plan.drop_last)
            if is_over and not any_failed:
                return
            is_wrong = last is None and not fewest if stream.is_sharded else fewest != most
            if any_failed or is_wrong:
                differ = _none_on if stream.is_sharded else _ended_on
                exchange(store_client(self._ranks), _NEXT, coming.samples, differ)
            if last is None and coming.fetched:
                self._compare(coming.fetched, before)
            # It has the shape of this rank's last step, without rows. All have a first step.
            last = coming.fetched or last._replace(step=last.step._replace(rows=0))
            coming = _Coming(steps)
            yield last

    def _compare(self, first: Fetched, before: str | None) -> None:
        """Compare how the stream begins with other ranks, and with how it did before. Collective.

        Raises:
            RuntimeError: where a dataset that all ranks read whole is not the same on each, or a
                sharded one is.
            ValueError: where it is read again, and yields something else.
        """

        def decide(facts: list[dict[str, Any]]) -> list[dict[str, Any]]:
            if self.reader.is_sharded:
                if len(facts) > 1 and all(fact == facts[0] for fact in facts):
                    raise RuntimeError(
                        f"each rank must have samples of its own with sharded=True, but all "
                        f"{len(facts)} begin with the same ones: split by world().rank too, and "
                        f"not only by worker, or leave out sharded=True"
                    )
                return facts
            cure = (
                "Let the dataset yield the same samples everywhere, drawing from the default "
                "generators alone, or pass sharded=True if it splits them by rank and worker."
            )
            raise_if_different("make_loader(IterableDataset)", facts, cure)
            return facts[:1]

        call = "iter(loader) of an IterableDataset"
        digests = exchange(
            store_client(self._ranks), call, lambda: {"first samples": first.digest}, decide
        )
        self.digest = content_hash(digests)
        if before not in (None, self.digest):
            raise ValueError(
                f"`dataset` must yield the same samples when read again to resume, but "
                f"{type(self.reader.dataset).__name__} does not: draw from the default generators "
                f"alone, or, without `sharded`, give it state_dict() and load_state_dict()"
            )


class _Coming:
    """The next step of this rank, if there is one, or the error that it ended in.

    While the step before runs, ranks vote on how many samples it has: 0 if there is none.
    """

    def __init__(self, steps: Iterator[Fetched]) -> None:
        self.fetched: Fetched | None = None
        self._error: Exception | None = None
        try:
            self.fetched = next(steps, None)
        except Exception as error:  # noqa: BLE001  # raised again, on every rank
            self._error = error
        self._count = 0 if self.fetched is None else self.fetched.step.samples
        numbers = [self._count, self._error is not None]
        self.counts = CheckedCollective(_NEXT, dict, str).start_min_max(numbers)

    def samples(self) -> int:
        """Return how many samples it has, or raise the error."""
        error, self._error = self._error, None  # it holds frames that hold this
        if error is not None:
            raise error
        return self._count


def _ended_on(counts: list[int]) -> None:
    shorter = [rank for rank, count in enumerate(counts) if count < max(counts)]
    raise RuntimeError(
        f"every rank must read the same samples, but they ended on {format_ranks(shorter)} of "
        f"{len(counts)} before the others: let the dataset yield the same samples everywhere, "
        f"drawing from the default generators alone, or pass sharded=True if it splits by rank"
    )


def _none_on(counts: list[int]) -> None:
    empty = format_ranks([rank for rank, count in enumerate(counts) if not count])
    raise RuntimeError(
        f"every rank must have a sample, but there is none at all on {empty} of {len(counts)}: let "
        f"the dataset yield some on each, or pass sharded=False"
    )
