"""The steps of a stream: alike in every worker, and ending at the same one on every rank."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pardata.collective._agreement import agree, require_same
from pardata.collective._vote import Vote
from pardata.data._position import Position
from pardata.data._reader import Fetched
from pardata.data._stream import Stream, hash_of, not_of_this_stream
from pardata.data._workers import Source
from pardata.ranks._table import ranks_text
from pardata.ranks._world import World

_NEXT = "the next step of an IterableDataset"


class Streamed(Source):
    """The steps of a stream: they end when all `ranks` are at their end."""

    def __init__(self, stream: Stream, ranks: World, **options: Any) -> None:
        super().__init__(stream, None, **options)
        self._ranks = ranks

    def steps(self, start: Position) -> Iterator[Fetched]:
        """Yield the steps after those delivered. Collective, at each step, if there are ranks."""
        stream: Stream = self.reader
        batch_size = stream.plan.batch_size
        first = -(-start.delivered // batch_size)
        # Of streams that differ only reading again tells which worker delivered how much of its.
        again = first if stream.is_sharded else 0
        state = start.state if stream.keeps_place else None
        if state is not None:
            self.renew_workers()
        stream.start_at(start.epoch, 0 if again else start.delivered, state)
        fetched = self._begun(start.epoch, lambda: iter(stream))
        if not stream.is_sharded:
            fetched = _alike(fetched, first)
        # One that resumes from its own state does not begin anew.
        compare = partial(self._compare, before=None if state is not None else start.digest)
        if self._ranks.size > 1:
            fetched = _together(fetched, self._ranks, stream, compare)
        else:
            fetched = _alone(fetched, compare)
        return _after(fetched, again, batch_size) if again else fetched

    def _compare(self, first: Fetched, before: str | None) -> None:
        """Compare how the stream begins with other ranks, and with how it did before. Collective.

        Raises:
            RuntimeError: where a dataset that all ranks read whole is not the same on each.
            ValueError: where it is read again, and yields something else.
        """
        is_sharded = self.reader.is_sharded

        def decide(told: list[dict[str, Any]]) -> list[Any]:
            cure = (
                "Let the dataset yield the same samples everywhere, drawing from the default "
                "generators alone, or pass sharded=True if each rank and worker has its own."
            )
            if not is_sharded:
                require_same("make_loader(IterableDataset)", told, cure)
            return [facts["first samples"] for facts in told[: None if is_sharded else 1]]

        place = "iter(loader) of an IterableDataset"
        digests = agree(self._ranks, place, lambda: {"first samples": first.digest}, decide)
        self.digest = hash_of(digests)
        if before not in (None, self.digest):
            raise ValueError(
                f"`dataset` must yield the same samples when an epoch is read again to resume, but "
                f"{type(self.reader.dataset).__name__} begins with others: let it draw from the "
                f"default generators alone, or, without `sharded`, give it state_dict() and "
                f"load_state_dict()"
            )


def _alone(own: Iterator[Fetched], compare: Callable[[Fetched], None]) -> Iterator[Fetched]:
    """Yield the steps of one rank that is alone, after the first was compared."""
    for number, current in enumerate(own):
        if number == 0:
            compare(current)
        yield current


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
                "every worker must read the same samples, but they differ: let the dataset not "
                "look at get_worker_info(), and draw from the default generators alone, or pass "
                "sharded=True if each rank and worker has its own"
            )
        digest, most = current.digest, current.step.samples
        yield current


def _together(
    own: Iterator[Fetched], here: World, stream: Stream, compare: Callable[[Fetched], None]
) -> Iterator[Fetched]:
    """Yield this rank's `own` steps, and imitate the last of them where only others have one left.

    Collective, without waiting at a step for that step: ranks tell each other what they have for
    the next one while this one is computed.

    Raises:
        RuntimeError: where a dataset that all ranks read whole ends at different steps, or a rank
            has nothing at all; on every rank. So does an error that `own` raises.
    """
    last: Any = None  # no step yet
    coming = _Coming(own, here)
    while True:
        (all_have, any_has), (fewest, most) = coming.told()
        if not any_has or (not all_have and stream.is_sharded and stream.plan.drop_last):
            return
        if not stream.is_sharded and fewest != most:
            coming.refuse(_ended_on)
        if last is None and not all_have:
            coming.refuse(_none_on)
        if last is None and coming.fetched:
            compare(coming.fetched)
        # Of the shape of this rank's last step, without rows: at the first step all have one.
        last = coming.fetched or last._replace(step=last.step._replace(rows=0))
        coming = _Coming(own, here)
        yield last


class _Coming:
    """The next step of this rank, if there is one, or the error that it ended in.

    Who has one, of how many samples, is voted on while the step before runs.
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
        said = [self.fetched is not None, self._samples, self._error is not None]
        self._vote = Vote(here, _NEXT, said)

    def told(self) -> list[tuple[int, int]]:
        """Return whether all have one and any, and the fewest and the most samples.

        Collective. An error of any rank is raised on all.
        """
        *told, (_, failed) = self._vote.result()
        if failed:
            agree(self._here, _NEXT, self._raised)
        return told

    def _raised(self) -> None:
        error, self._error = self._error, None  # it holds frames that hold this
        if error is not None:
            raise error

    def refuse(self, text: Callable[[list[int]], str]) -> None:
        """Raise an error with what `text` says of the samples that each rank has. Collective."""

        def decide(counts: list[int]) -> None:
            raise RuntimeError(text(counts))

        agree(self._here, "the end of an IterableDataset", lambda: self._samples, decide)


def _ended_on(counts: list[int]) -> str:
    shorter = [rank for rank, count in enumerate(counts) if count < max(counts)]
    return (
        f"every rank must read the same samples, but they ended on {ranks_text(shorter)} of "
        f"{len(counts)} before the others: let the dataset yield the same samples everywhere, "
        f"drawing from the default generators alone, or pass sharded=True if each rank has its own"
    )


def _none_on(counts: list[int]) -> str:
    empty = ranks_text([rank for rank, count in enumerate(counts) if not count])
    return (
        f"every rank must have a sample, but there is none at all on {empty} of {len(counts)}: let "
        f"the dataset yield some on each, or pass sharded=False"
    )


def _after(fetched: Iterator[Fetched], again: int, batch_size: int) -> Iterator[Fetched]:
    """Yield what comes after the first `again` steps, which have been delivered."""
    for count in range(again):
        if next(fetched, None) is None:  # on every rank: they end together
            why = f"on some rank it ended after {count} of {again} steps"
            raise not_of_this_stream(again * batch_size, why)
    yield from fetched
