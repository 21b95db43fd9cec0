"""Where a loader is, as a few numbers, and whether another loader can resume there."""

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

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


class Recipe(NamedTuple):
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
        own = self.state(Position(0))
        found = state if isinstance(state, Mapping) else {}
        if found.keys() != own.keys() or found["version"] != _VERSION:
            raise ValueError(
                f"`state` must be what the state_dict() of a loader returned, of version "
                f"{_VERSION}, but is {reprlib.repr(state)}, version {found.get('version')!r:.30}: "
                f"look at what was saved, or load it with the release of pardata that saved it"
            )
        fixed = list(self.facts)
        if not (self.is_stream or self.facts["sampler"] or self.facts["batch_sampler"]):
            fixed += ["digest", "state"]  # None: the order is that of the seed
        if differ := [name for name in fixed if state[name] != own[name]]:
            told = [f"{key} was {reprlib.repr(state[key])} and is {own[key]!r}" for key in differ]
            raise ValueError(
                f"`state` must come from a loader with the same dataset and arguments, but "
                f"{', '.join(told)}: make this loader, and those before it, as at the save"
            )
        epoch, delivered = state["epoch"], state["delivered"]
        if not (_is_count(epoch) and _is_count(delivered) and self._ends_a_batch(delivered)):
            raise ValueError(
                f"`state` must be at the end of a batch of {self.facts['batch_size']}, but is at "
                f"sample {reprlib.repr(delivered)} of epoch {reprlib.repr(epoch)}: look at what "
                f"was saved"
            )
        return Position(epoch, delivered, state["digest"], state["state"])

    def _ends_a_batch(self, delivered: int) -> bool:
        batch_size, drop_last = self.facts["batch_size"], self.facts["drop_last"]
        if batch_size is None:
            return True  # of a batch_sampler, whose order is compared when it is drawn
        whole = delivered % batch_size == 0
        if self.is_stream or self.facts["sampler"]:
            # It may end anywhere, whatever its __len__ says; of one of which every rank has its
            # own, each step counts as a whole one.
            return whole or (not drop_last and self.facts["shards"] is None)
        length = self.facts["length"]
        last = length - length % batch_size if drop_last else length
        return bool(delivered == last or (delivered < last and whole))


def _is_count(value: object) -> bool:
    # Below 2**63: streams keep it in a tensor, and an order takes no more of it into account.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
