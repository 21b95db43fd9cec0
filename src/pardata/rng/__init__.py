"""Seeds, saves and restores the default random number generators."""

from pardata.rng._seed_everything import seed_everything

__all__ = ["seed_everything"]
