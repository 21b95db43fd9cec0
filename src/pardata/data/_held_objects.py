"""Finds objects that a dataset or transform holds: generators, open files, lists of samples."""

import hashlib
import io
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import PurePath
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import IterableDataset

from pardata.data._batched_read import datasets_in
from pardata.rng._rng_state import numpy_or_none

_SOME = 1000  # the maximum number of entries of a list that are hashed
_DEEPEST = 5  # the maximum depth of attributes and items
# Classes of file handles that a forked process shares with its parent, by module.
_HANDLES = {"zipfile": "ZipFile", "tarfile": "TarFile", "sqlite3": "Connection", "h5py": "File"}


def held_generators(name: str, holder: Any) -> Iterator[str]:
    """Yield the path of each generator that an object holds, as ``dataset.transform.rng``."""
    kinds: tuple[Any, ...] = random.Random, torch.Generator
    defaults = {id(torch.default_generator), id(random.random.__self__)}  # type: ignore[attr-defined]  # a method
    if (numpy := numpy_or_none()) is not None:
        kinds += numpy.random.Generator, numpy.random.RandomState
        defaults.add(id(numpy.random.random.__self__))
    return _paths(name, holder, lambda x: isinstance(x, kinds) and id(x) not in defaults)


def open_files(name: str, holder: Any) -> Iterator[str]:
    """Yield the path of each file that an object holds open for reading."""
    modules = ((sys.modules.get(module), kind) for module, kind in _HANDLES.items())
    handles = tuple(getattr(module, kind) for module, kind in modules if module is not None)

    def is_open(value: Any) -> bool:
        if isinstance(value, io.IOBase):
            in_memory = isinstance(value, io.BytesIO | io.StringIO)
            # Writable files are logs or the terminal, to which lines are written whole.
            return not (value.closed or in_memory or value.writable())
        return isinstance(value, handles)

    return _paths(name, holder, is_open)


def listed_samples(dataset: Any) -> str:
    """Return a hash of what a dataset lists: files, indices, labels, and the numbers of classes.

    It looks at lists and vectors with an entry for each sample, and at dicts that number classes.
    It hashes only the last name of a path, because nodes may keep the files in different folders.
    """
    lists: list[list[Any]] = []
    for layer in datasets_in(dataset) if not isinstance(dataset, IterableDataset) else ():
        held = [layer, *getattr(layer, "__dict__", {}).values()]
        held += [part for value in held if type(value) is tuple for part in value[:_SOME]]
        for value in held:
            entries: Any = ()
            if _numbers_classes(value):
                entries = sorted(value, key=value.get)
            elif _is_vector(value) and len(value) == len(layer):
                some = value[:: len(value) // _SOME or 1]
                entries = some.tolist() if hasattr(some, "tolist") else some
            # Other entries may be a cache, which differs between ranks.
            if all(names := [_name(entry) for entry in entries]):
                lists.append(names)
    return hashlib.sha256(repr(lists).encode()).hexdigest()[:16] if any(lists) else ""


def _numbers_classes(value: Any) -> bool:
    are_numbers = type(value) is dict and all(type(number) is int for number in value.values())
    return are_numbers and len(value) > 1 and sorted(value.values()) == [*range(len(value))]


def _is_vector(value: Any) -> bool:
    # By the class first, because `ndim` of another object may read a file, or raise.
    is_array = isinstance(value, torch.Tensor) or type(value).__module__ == "numpy"
    return isinstance(value, list | tuple) or (is_array and getattr(value, "ndim", 0) == 1)


def _name(entry: Any) -> list[Any]:
    """Return the integers and texts in an entry, for example a file name and a label."""
    if isinstance(entry, tuple):
        return [name for part in entry for name in _name(part)]
    if isinstance(entry, str | PurePath):
        return [PurePath(entry).name]
    return [entry] if isinstance(entry, int) else []


def _paths(name: str, holder: Any, is_wanted: Callable[[Any], bool]) -> Iterator[str]:
    """Yield the paths of the wanted objects, in breadth-first order."""
    seen, layer = set[int](), [(name, holder)]
    for _ in range(_DEEPEST):
        below: list[tuple[str, Any]] = []
        for path, value in layer:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if is_wanted(value):
                yield path
            else:
                below += _parts(path, value)
        layer = below


def _parts(path: str, value: Any) -> list[tuple[str, Any]]:
    """Return the attributes or items of an object, but not of a collection with 100 items or more.

    It runs no code of the user's, which might open files or draw random numbers.
    """
    if isinstance(value, dict | list | tuple):
        items = dict.items(value) if isinstance(value, dict) else enumerate(value)
        return [(f"{path}[{key!r}]", item) for key, item in items] if len(value) < 100 else []
    if isinstance(value, torch.Tensor | type | ModuleType) or not type(value).__dictoffset__:
        return []
    return [(f"{path}.{key}", item) for key, item in vars(value).items()]
