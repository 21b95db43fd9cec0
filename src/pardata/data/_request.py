"""What a reader is asked for one step, what it gives back, and the seeds under which it reads."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from pardata.data._plan import Step
from pardata.seeds._generators import forked_seed, no_draws
from pardata.seeds._mix import mix

Indices: TypeAlias = "Tensor | Sequence[Any]"
"""The numbers of samples; a sampler may yield those of any kind."""

_THOROUGH_EACH = 16  # steps: looking at every generator takes as long as a small batch


class Request(NamedTuple):
    """What one rank reads for one step: the indices of each microbatch, or of its whole share."""

    step: Step
    indices: list[Indices]


class Fetched(NamedTuple):
    """What was read of one step; a named tuple, which ``DataLoader`` pins field by field."""

    step: Step
    batches: list[Any]  # one for each microbatch, or that of the whole share
    digest: str = ""  # of a stream: a hash of what its reader read first


class User(Enum):
    """Who may draw random numbers for a microbatch: each draws others."""

    COLLATE_FN = "collate_fn"
    BATCH_TRANSFORM = "batch_transform"
    GETITEMS = "__getitems__"


@dataclass(frozen=True)
class Seeds:
    """From where randomness comes: `reproducible` seeds each sample and each microbatch."""

    seed: int
    reproducible: bool
    microbatches: bool

    def of_samples(self, epoch: int) -> Callable[[Any], int]:
        """Return what gives the seed of each sample from its index."""
        key = mix(self.seed, epoch)
        # A sampler may yield indices of any kind.
        return lambda index: mix(
            key, *([index] if isinstance(index, int) else repr(index).encode())
        )

    def around(
        self, user: User, step: Step, microbatch: int, device: torch.device | None = None
    ) -> AbstractContextManager[None]:
        """Return the context in which `user` sees one microbatch, or one rank's share."""
        if not self.reproducible:
            return nullcontext()
        if self.microbatches:
            name = user.value.encode()
            return forked_seed(mix(self.seed, step.epoch, step.number, microbatch, *name), device)
        return no_draws(user.value, device, thorough=step.number % _THOROUGH_EACH == 0)
