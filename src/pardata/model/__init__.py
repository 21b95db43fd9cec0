"""A module, whatever wraps it: read through, unwrapped, its state, buffers."""

from pardata.model._state_dict import LoadedKeys
from pardata.model._unwrap import unwrap

__all__ = ["LoadedKeys", "unwrap"]
