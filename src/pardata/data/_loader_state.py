"""Where a loader is, as a few numbers, and whether another loader can resume there."""

import reprlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from pardata.environment._logger import get_logger

_log = get_logger(__name__)

_VERSION = 1


class Position(NamedTuple):
    """An epoch, and how many of its samples have been delivered, over all ranks.

    Attributes:
        digest: where a sampler, or a stream, decides on the order: a hash of it.
        state: where a stream keeps its place itself: that, in a tuple, which
            ``torch.distributed.checkpoint`` takes as a whole.
    """

    epoch: int
    delivered: int = 0
    digest: str | None = None
    state: Any = None


@dataclass(eq=False)
class Pass:
    """One pass through an epoch, or through the rest of it.

    Attributes:
        is_running: whether it has begun, and the loop may ask for another batch.
        is_abandoned: whether the loop over it was left before its end.
    """

    is_running: bool = False
    is_abandoned: bool = False


class EpochCursor:
    """Where a loader is. It knows no data: each method is a transition between positions.

    Attributes:
        now: what the pass in progress, or the last one, has delivered.
        next: where the next iter() begins.
        next_unfinished: where `epochs` begins, which a look at a batch does not move.
    """

    def __init__(self) -> None:
        self.now = self.next = self.next_unfinished = Position(0)
        self._newest = Pass()
        self._pin: Position | None = None  # in a body of `epochs`: where it began

    @property
    def epoch(self) -> int:
        """The epoch in progress, else the next one."""
        return self.now.epoch if self._newest.is_running else self.next.epoch

    @property
    def counts_as_done(self) -> bool:
        """Whether a body of `epochs` runs whose loop was left.

        Not while an exception is handled, which may have ended that loop.
        """
        return self._newest.is_abandoned and self._pin is not None and sys.exc_info()[0] is None

    @property
    def state(self) -> Position:
        """What `state_dict` tells."""
        if self.counts_as_done:
            return Position(self.now.epoch + 1)
        # A second pass in one body of `epochs` changes nothing: its epoch is done.
        return self.now if self.now.epoch >= self.next_unfinished.epoch else self.next_unfinished

    @property
    def _is_set(self) -> bool:
        """Whether another epoch was set while the newest pass was running."""
        return self.next.epoch != self.now.epoch + (self._pin is None)

    def begin(self) -> Pass:
        """Begin the next epoch, or what is left of the one that was resumed."""
        self.now, self._newest = self.next, Pass()
        return self._newest

    def use_up(self, begun: Pass) -> None:
        """Let the next pass begin in the next epoch, as this one can be read."""
        begun.is_running = True
        if self._pin is None:
            self.next = Position(self.now.epoch + 1)

    def check(self, begun: Pass) -> None:
        """Raise if a newer pass has begun: two would read from the same workers."""
        if begun is not self._newest:
            raise RuntimeError(
                "a loader must run one epoch at a time, but a newer iter() has begun, or a state "
                "was loaded: call iter() again, or make another loader"
            )

    def delivered(self, begun: Pass, samples: int, digest: str | None, state: Any) -> None:
        """Count the samples of a step as delivered."""
        self.check(begun)  # again, because another thread may have begun a pass
        self.now = Position(self.now.epoch, self.now.delivered + samples, digest, state)

    def finished(self, begun: Pass) -> None:
        """Count the epoch as done."""
        self.check(begun)
        if not self._is_set:
            self.next_unfinished = Position(self.now.epoch + 1)
            self.next = self.next_unfinished if self._pin is None else Position(self.now.epoch)

    def abandon(self, begun: Pass) -> None:
        """Take down that the loop over this pass was left."""
        begun.is_abandoned = not self._is_set

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass in this epoch; the rest of one that was resumed stays its rest."""
        is_next = epoch == self.next.epoch
        if self._pin is None or not is_next:  # `epochs` has set it already
            self.go_to(self.next if is_next else Position(epoch))

    def go_to(self, start: Position) -> None:
        """Begin the next pass there."""
        self.next = self.next_unfinished = start
        self._newest.is_abandoned = False
        if not self._newest.is_running:
            self.now = start

    def resume_at(self, start: Position) -> None:
        """Begin the next pass there: what came before it has been delivered. End one that runs."""
        self._newest = Pass()
        self.go_to(start)

    @contextmanager
    def pinned_epoch(self, start: Position) -> Iterator[None]:
        """Begin each pass in this block at `start`, and after its end the next epoch."""
        self.go_to(start)
        self._pin = start
        try:
            yield
            # Else it ran to its end, or the body has loaded a state or set an epoch.
            if self.next_unfinished is start:
                self.next_unfinished = Position(start.epoch + 1)
        finally:
            if self._pin is start:  # else another loop has begun: of an error, say, in a notebook
                self._pin = None
            self.next = self.next_unfinished


class StateSchema(NamedTuple):
    """What decides which samples are in which step: it must be the same to resume."""

    facts: dict[str, Any]  # JSON-like, by the names of arguments
    is_stream: bool

    def state(self, position: Position) -> dict[str, Any]:
        """Return what `position` reads, as JSON-like values."""
        return {"version": _VERSION, **position._asdict(), **self.facts}

    def position(self, state: Mapping[str, Any]) -> Position:
        """Return the position that `state` holds.

        Raises:
            ValueError: where it was not taken from a loader like this one.
        """
        ours = self.state(Position(0))
        saved = state if isinstance(state, Mapping) else {}
        if saved.keys() != ours.keys() or saved["version"] != _VERSION:
            raise ValueError(
                f"`state` must be what the state_dict() of a loader returned, of version "
                f"{_VERSION}, but is {reprlib.repr(state)}, version {saved.get('version')!r:.30}: "
                f"look at what was saved, or load it with the release of pardata that saved it"
            )
        # A position is a number of samples, unless a stream seeds and reads them by batches.
        free = ["microbatch_size"] if self.is_stream else ["batch_size", "microbatch_size"]
        fixed = [name for name in self.facts if name not in free]
        if not (self.is_stream or self.facts["sampler"] or self.facts["batch_sampler"]):
            fixed += ["digest", "state"]  # None: the order is that of the seed
        if differ := [name for name in fixed if state[name] != ours[name]]:
            diffs = [f"{key} was {reprlib.repr(state[key])} and is {ours[key]!r}" for key in differ]
            raise ValueError(
                f"`state` must come from a loader with the same dataset and arguments, but "
                f"{', '.join(diffs)}: make this loader, and those before it, as at the save"
            )
        epoch, delivered = state["epoch"], state["delivered"]
        length = None if self.is_stream else self.facts["length"]
        is_next = _is_count(epoch) and _is_count(delivered)
        if not is_next or (length is not None and delivered > length):
            raise ValueError(
                f"`state` must be at a sample of an epoch, but is at sample "
                f"{reprlib.repr(delivered)} of epoch {reprlib.repr(epoch)}: look at what was saved"
            )
        if others := [f"a {name} of {state[name]}" for name in free if state[name] != ours[name]]:
            text = "the loader resumes at sample %d of epoch %d of a run with %s"
            _log.info(text, delivered, epoch, " and ".join(others))
        return Position(epoch, delivered, state["digest"], state["state"])


def _is_count(value: object) -> bool:
    # Below 2**63: streams keep it in a tensor, and an order takes no more of it into account.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
