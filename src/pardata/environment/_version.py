"""The version of the distribution, which checkpoints record."""

__version__ = "0.1.0"
