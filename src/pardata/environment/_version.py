"""The version: of the distribution, in checkpoints, in what the doctor prints."""

__version__ = "0.1.0"
