"""The random numbers of samples and microbatches: seeded, put back, or forbidden."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import NamedTuple

import torch

from pardata.data._plan import GlobalStep
from pardata.seeds import _generators as generators
from pardata.seeds._mix import mix


class Seeds(NamedTuple):
    """From where randomness comes: `reproducible` seeds each sample and each microbatch."""

    seed: int
    reproducible: bool
    microbatches: bool

    def around_reading(self) -> generators.Kept:
        """Return the context in which the samples of a step are read and collated."""
        return generators.Kept(generators.default_generators() if self.reproducible else ())

    def around(
        self, user: str, step: GlobalStep, microbatch: int, device: torch.device | None = None
    ) -> AbstractContextManager[None]:
        """Return the context in which `user` sees one microbatch, or one rank's share.

        A `user` is an argument or a method, by its name: each draws other numbers. Without a
        `device` it is within `around_reading`, which puts the generators back.
        """
        if not self.reproducible:
            return nullcontext()
        if self.microbatches:
            seed = mix(self.seed, step.epoch, step.number, microbatch, _number_of(user))
            if device is not None:
                return generators.forked_seed(seed, device)
            generators.seed_generators(seed)
            return nullcontext()
        return generators.no_draws(user, device)


@cache
def _number_of(user: str) -> int:
    return mix(*user.encode())
