"""Seeds, saves and restores the default random number generators."""

from pardata.rng._rng_state import seed_everything

__all__ = ["seed_everything"]
