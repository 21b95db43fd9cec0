"""Where a loader is, as a few numbers, and whether another loader can go on from there."""

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

_VERSION = 1


class Position(NamedTuple):
    """An epoch, and how many of its samples have been delivered, over all ranks."""

    epoch: int
    delivered: int

    def after(self, count: int) -> "Position":
        """Return the position `count` samples on."""
        return Position(self.epoch, self.delivered + count)


@dataclass(frozen=True)
class Recipe:
    """What decides which samples are in which step: it must be the same to go on."""

    length: int | None  # None for a stream without
    batch_size: int
    microbatch_size: int | None
    shuffle: bool
    drop_last: bool
    seed: int
    sampler: str | None  # the name of its class
    shards: str | None  # of a data set that yields to each rank and worker its own: how many

    def state(self, position: Position) -> dict[str, Any]:
        """Return what `position` reads, as JSON-like values."""
        return {"version": _VERSION, **position._asdict(), **asdict(self)}

    def position(self, state: Mapping[str, Any], *, is_stream: bool = False) -> Position:
        """Return the position that `state` holds.

        Raises:
            ValueError: where it was not taken from a loader like this one.
        """
        own = self.state(Position(0, 0))
        is_mapping = isinstance(state, Mapping)
        version = state.get("version", _VERSION) if is_mapping else _VERSION
        if version != _VERSION:
            msg = (
                f"`state` must be of version {_VERSION}, but is of version "
                f"{reprlib.repr(version)}: load it with the release of pardata that saved it"
            )
            raise ValueError(msg)
        if not is_mapping or state.keys() != own.keys():
            msg = (
                f"`state` must be what the state_dict() of a loader returned, but is "
                f"{reprlib.repr(state)}: look at what was saved"
            )
            raise ValueError(msg)
        differ = [
            f"{name} was {reprlib.repr(state[name])} and is {own[name]!r}"
            for name in own
            if name not in ("epoch", "delivered") and state[name] != own[name]
        ]
        if differ:
            msg = (
                f"`state` must come from a loader with the same data set and arguments, but "
                f"{', '.join(differ)}: make the loader as it was when the state was saved"
            )
            raise ValueError(msg)
        epoch, delivered = state["epoch"], state["delivered"]
        counts = _is_count(epoch) and _is_count(delivered)
        if not counts or not self._ends_a_batch(delivered, is_stream=is_stream):
            msg = (
                f"`state` must be at the end of a batch of {self.batch_size}, but is at sample "
                f"{reprlib.repr(delivered)} of epoch {reprlib.repr(epoch)}: look at what was saved"
            )
            raise ValueError(msg)
        return Position(epoch, delivered)

    def _ends_a_batch(self, delivered: int, *, is_stream: bool) -> bool:
        if is_stream:
            # It may end anywhere, whatever its __len__ says; of one of which every rank has its
            # own, each step counts as a whole one.
            ends_anywhere = not self.drop_last and self.shards is None
            return delivered % self.batch_size == 0 or ends_anywhere
        length = self.length or 0
        last = length - length % self.batch_size if self.drop_last else length
        return delivered == last or (delivered < last and delivered % self.batch_size == 0)


def _is_count(value: object) -> bool:
    # Below 2**63: streams keep it in a tensor, and an order takes no more of it into account.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
