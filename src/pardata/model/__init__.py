"""Modules and their wrappers: transparent access, unwrapping, state dicts, gradients, buffers."""

from pardata.model._state_dict import LoadedKeys
from pardata.model._unwrap import unwrap

__all__ = ["LoadedKeys", "unwrap"]
