"""The state of a run, saved so that it survives."""

from pardata.checkpoint._checkpoint import Restored as Restored
from pardata.checkpoint._checkpointer import Checkpointer as Checkpointer

__all__ = ["Checkpointer", "Restored"]
