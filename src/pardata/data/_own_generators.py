"""Random generators that a dataset or a transform has of its own, which no loader seeds."""

import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from pardata.rng._rng_state import numpy_or_none

_DEEPEST = 5  # attributes, items and entries from the object on


def own_generators(name: str, holder: Any) -> Iterator[str]:
    """Yield the path of each generator that an object holds, as ``dataset.transform.rng``."""
    kinds: tuple[Any, ...] = random.Random, torch.Generator
    seen = {id(torch.default_generator), id(random.random.__self__)}  # type: ignore[attr-defined]  # a method
    if (numpy := numpy_or_none()) is not None:
        kinds += numpy.random.Generator, numpy.random.RandomState
        seen.add(id(numpy.random.random.__self__))
    layer = [(name, holder)]
    for _ in range(_DEEPEST):
        below: list[tuple[str, Any]] = []
        for path, value in layer:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, kinds):
                yield path
            else:
                below += _parts(path, value)
        layer = below


def _parts(path: str, value: Any) -> list[tuple[str, Any]]:
    """Return what an object holds that may hold a generator: not samples by the thousand.

    It runs no code of the user's: a mapping of its own may open files, or draw.
    """
    if isinstance(value, dict | list | tuple):
        items = dict.items(value) if isinstance(value, dict) else enumerate(value)
        return [(f"{path}[{key!r}]", item) for key, item in items] if len(value) < 100 else []
    if isinstance(value, torch.Tensor | type | ModuleType) or not type(value).__dictoffset__:
        return []
    return [(f"{path}.{key}", item) for key, item in vars(value).items()]
