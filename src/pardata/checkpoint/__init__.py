"""The state of a run, saved so that it survives."""

from pardata.checkpoint._checkpointer import Checkpointer
from pardata.checkpoint._restore import Restored

__all__ = ["Checkpointer", "Restored"]
