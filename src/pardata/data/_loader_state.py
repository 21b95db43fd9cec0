"""The state of a loader: epoch and number of samples, saved and validated.

Does not store samples or their order: the seed and the arguments decide these.
"""

import reprlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from pardata.environment._logger import get_logger
from pardata.environment._world import world
from pardata.rng._rng_state import get_rng_state, set_rng_state

_log = get_logger(__name__)

_VERSION = 1
_LOOKS = 2  # passes of one body of `epochs` that are left after a batch: above 1 it is a habit


class Position(NamedTuple):
    """An epoch, and the number of its samples delivered, over all ranks.

    Attributes:
        digest: a hash of the order of a user's sampler or a stream, else None.
        state: the state of a stateful dataset, in a tuple, which ``torch.distributed.checkpoint``
            does not flatten.
    """

    epoch: int
    delivered: int = 0
    digest: str | None = None
    state: Any = None


@dataclass(eq=False)
class Pass:
    """One iteration over an epoch, or over the remaining steps of a resumed one.

    Attributes:
        is_running: whether its loop may still ask for batches.
        is_abandoned: whether its loop was left before the end.
        steps: how many steps its loop got.
    """

    is_running: bool = False
    is_abandoned: bool = False
    steps: int = 0


class EpochCursor:
    """Keeps the positions of a loader. Each method is a transition between them; it reads no data.

    Attributes:
        now: the position of the current pass, or of the last one.
        next: the position where the next iter() begins.
        next_unfinished: the position where `epochs()` continues; ``next(iter(loader))`` does not
            change it.
    """

    def __init__(self) -> None:
        self.now = self.next = self.next_unfinished = Position(0)
        self._newest = Pass()
        self._pin: Position | None = None  # in a body of `epochs`: the position where it began
        self._start_state: dict[str, Any] | None = None  # the generators' states at its start
        # Their states to restore at the start of the next body, and at its first batch.
        self.generators: tuple[Any, Any] | None = None
        self._looks = 0  # in that body: passes that were left after their first batch

    @property
    def epoch(self) -> int:
        """The current epoch, or between passes the next one."""
        return self.now.epoch if self._newest.is_running else self.next.epoch

    @property
    def counts_as_done(self) -> bool:
        """Whether the loop in the current body of `epochs` was left: its epoch counts as done.

        Not during an exception, which may have ended that loop.
        """
        return self._newest.is_abandoned and self._pin is not None and sys.exc_info()[0] is None

    @property
    def state(self) -> Position:
        """The position that `state_dict` saves."""
        if self.counts_as_done:
            return Position(self.now.epoch + 1)
        # In a second pass of one body the position stays: its epoch is done.
        return self.now if self.now.epoch >= self.next_unfinished.epoch else self.next_unfinished

    @property
    def state_at_start(self) -> dict[str, Any] | None:
        """The generators' states at the start of the body in which `state` resumes."""
        pinned = self._pin is not None and self.state.epoch == self._pin.epoch
        return self._start_state if pinned else None

    @property
    def _is_set(self) -> bool:
        """Whether `set_epoch` was called during the newest pass."""
        return self.next.epoch != self.now.epoch + (self._pin is None)

    def begin(self) -> Pass:
        """Begin the next epoch, or the remaining steps of a resumed one."""
        self.now, self._newest = self.next, Pass()
        return self._newest

    def use_up(self, begun: Pass) -> None:
        """Mark this pass as running, and let the next one begin in the next epoch."""
        begun.is_running = True
        if self._pin is None:
            self.next = Position(self.now.epoch + 1)
        if self.generators is not None:
            set_rng_state(self.generators[1], world().device, only_seed=False)
            self.generators = None

    def check(self, begun: Pass) -> None:
        """Raise if a newer pass has begun, because two passes would share the workers."""
        if begun is not self._newest:
            msg = "a loader must run one epoch at a time, but a newer iter() has begun, or a state"
            raise RuntimeError(f"{msg} was loaded: call iter() again, or make another loader")

    def delivered(self, begun: Pass, samples: int, digest: str | None, state: Any) -> None:
        """Count the samples of a step as delivered."""
        self.check(begun)  # another thread may have begun a pass
        begun.steps += 1
        self.now = Position(self.now.epoch, self.now.delivered + samples, digest, state)

    def finished(self, begun: Pass) -> None:
        """Count the epoch as done."""
        self.check(begun)
        if not self._is_set:
            self.next_unfinished = Position(self.now.epoch + 1)
            self.next = self.next_unfinished if self._pin is None else Position(self.now.epoch)

    def abandon(self, begun: Pass) -> None:
        """Record that the loop over this pass was left."""
        begun.is_abandoned = not self._is_set
        self._looks += self._pin is not None and begun.steps == 1
        if self._looks == _LOOKS:
            text = "each iter() in a body of `epochs` begins the epoch anew, so next(iter(loader))"
            text += " returns its first batch again: make one iterator before the steps"
            _log.warning(text, ranks=[0], once=True)

    def set_epoch(self, epoch: int) -> None:
        """Begin the next pass in `epoch`; a resumed epoch keeps its position."""
        is_next = epoch == self.next.epoch
        if self._pin is None or not is_next:  # in a body of `epochs` it is set already
            self.go_to(self.next if is_next else Position(epoch))

    def go_to(self, start: Position) -> None:
        """Begin the next pass at `start`."""
        self.next = self.next_unfinished = start
        self._newest.is_abandoned = False
        if not self._newest.is_running:
            self.now = start

    def resume_at(self, start: Position) -> None:
        """Begin the next pass at `start`, and end a running one."""
        self._newest = Pass()
        self.generators = None
        self.go_to(start)

    @contextmanager
    def pinned_epoch(self, start: Position) -> Iterator[None]:
        """Begin each pass in the block at `start`, and the first one after it in the next epoch."""
        self.go_to(start)
        self._pin, self._looks = start, 0
        if self.generators is not None:
            set_rng_state(self.generators[0], world().device, only_seed=False)
        self._start_state = get_rng_state(world().device)
        try:
            yield
            # Otherwise the epoch has finished, or the body has loaded a state or set an epoch.
            if self.next_unfinished is start:
                self.next_unfinished = Position(start.epoch + 1)
        finally:
            # Otherwise a newer loop has begun, as in a notebook after an error.
            if self._pin is start:
                self._pin = self.generators = None
            self.next = self.next_unfinished


class StateSchema(NamedTuple):
    """The arguments that decide the samples of each step, which must be equal to resume."""

    facts: dict[str, Any]  # JSON-like values by the names of arguments
    is_stream: bool

    def state(self, position: Position) -> dict[str, Any]:
        """Return the state for `position`, as JSON-like values."""
        return {"version": _VERSION, **position._asdict(), **self.facts}

    def position(self, state: Mapping[str, Any]) -> Position:
        """Return the position that `state` holds.

        Raises:
            ValueError: the state comes from a loader with other arguments or data.
        """
        ours = self.state(Position(0))
        saved = state if isinstance(state, Mapping) else {}
        if saved.keys() != ours.keys() or saved["version"] != _VERSION:
            raise ValueError(
                f"`state` must be what the state_dict() of a loader returned, of version "
                f"{_VERSION}, but is {reprlib.repr(state)}, version {saved.get('version')!r:.30}: "
                f"look at what was saved, or load it with the release of pardata that saved it"
            )
        # The batch size may differ, because a position counts samples, but not of a stream, which
        # is seeded by batches.
        free = ["microbatch_size"] if self.is_stream else ["batch_size", "microbatch_size"]
        fixed = [name for name in self.facts if name not in free]
        if not (self.is_stream or self.facts["sampler"] or self.facts["batch_sampler"]):
            fixed += ["digest", "state"]  # both None: the seed decides the order
        if differ := [name for name in fixed if state[name] != ours[name]]:
            diffs = [f"{key} was {reprlib.repr(state[key])} and is {ours[key]!r}" for key in differ]
            msg = "`state` must come from a loader with the same dataset and arguments, but"
            msg += f" {', '.join(diffs)}: make this loader, and those before it, as at the save"
            raise ValueError(msg)
        epoch, delivered = state["epoch"], state["delivered"]
        length = None if self.is_stream else self.facts["length"]
        is_valid = _is_count(epoch) and _is_count(delivered)
        if not is_valid or (length is not None and delivered > length):
            raise ValueError(
                f"`state` must be at a sample of an epoch, but is at sample "
                f"{reprlib.repr(delivered)} of epoch {reprlib.repr(epoch)}: look at what was saved"
            )
        if others := [f"a {name} of {state[name]}" for name in free if state[name] != ours[name]]:
            text = "the loader resumes at sample %d of epoch %d of a run with %s"
            _log.info(text, delivered, epoch, " and ".join(others))
        return Position(epoch, delivered, state["digest"], state["state"])


def _is_count(value: object) -> bool:
    # Below 2**63, because streams keep it in an int64 tensor.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
