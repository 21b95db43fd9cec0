"""The gradient of the global batch, and exact sums of it."""

from pardata.gradient._backward import backward

__all__ = ["backward"]
