"""One step: what is run, counted and sent."""

from pardata.step._mean import Mean

__all__ = ["Mean"]
