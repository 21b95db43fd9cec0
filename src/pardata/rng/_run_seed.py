"""The seed of the run, from which each microbatch draws its random numbers."""

from dataclasses import dataclass


@dataclass
class RunSeed:
    """What this process remembers of `seed_everything`.

    Attributes:
        seed: that it was given; None if it was not called.
        calls: how often, since then, `backward` was given a batch of which no loader says more.
    """

    seed: int | None = None
    calls: int = 0


run_seed = RunSeed()
