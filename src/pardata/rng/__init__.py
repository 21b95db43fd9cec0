"""All random numbers: seeded, put back, caught in use."""

from pardata.rng._seed_everything import seed_everything

__all__ = ["seed_everything"]
