"""The state of a run, saved so that it survives."""

from pardata.checkpoint._checkpoint import Restored
from pardata.checkpoint._checkpointer import Checkpointer

__all__ = ["Checkpointer", "Restored"]
