"""Finds objects that a dataset or transform holds: generators, open files, lists of samples."""

import hashlib
import io
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import PurePath
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from pardata._pytree import content_hash
from pardata.data._batched_read import datasets_in
from pardata.data._mixture import Mixture
from pardata.rng._rng_state import numpy_or_none

_MOST_BYTES = 2**28  # hashed of an array; of a list a 16th, as text
_MANY = 100  # items of a collection whose items are not looked at
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


def held_mixtures(dataset: Any) -> list[Mixture]:
    """Return the mixtures that a dataset holds, or that it is, and those in these."""
    found = [each for _, each in _found("", dataset, lambda x: isinstance(x, Mixture))]
    return found + [inner for each in found for inner in held_mixtures(each.datasets)]


def listed_samples(dataset: Any, *, floats: bool = False) -> str:
    """Return a hash of what a dataset lists: files, indices, labels, and the numbers of classes.

    It looks at lists, vectors and columns of tables with an entry for each sample, and at dicts
    that number classes. It hashes only the last name of a path, because nodes may keep the files in
    different folders. Of large arrays and lists of large entries it hashes every nth entry.

    Args:
        dataset: the datasets in its attributes count too.
        floats: whether to hash also floats, and arrays of several dimensions, which may differ
            between ranks.
    """
    layers = [] if isinstance(dataset, IterableDataset) else [*datasets_in(dataset)]
    columns: list[Any] = [mixture.facts() for mixture in held_mixtures(dataset)]
    for layer in layers:  # more are appended meanwhile
        held = {id(value): value for value in (layer, *getattr(layer, "__dict__", {}).values())}
        inner = (one for value in held.values() for one in datasets_in(value))
        inner = (one for one in inner if isinstance(one, Dataset) and hasattr(one, "__len__"))
        layers += [one for one in inner if all(one is not other for other in layers)]
        for entries in chain(*(_vectors(x, len(layer), floats=floats) for x in held.values())):
            with suppress(RuntimeError):  # sparse tensors, and those on "meta", are no lists
                columns += _columns(_some(entries), floats=floats)
    return hashlib.sha256(repr(columns).encode()).hexdigest()[:16] if columns else ""


def _vectors(value: Any, length: int, *, floats: bool) -> Iterator[Any]:
    """Yield what an attribute holds with an entry for each sample, or for each class."""
    if type(value).__module__.startswith("pandas") and hasattr(value, "to_numpy"):
        value = value.to_numpy().tolist()
    are_numbers = type(value) is dict and {*map(type, value.values())} == {int}
    if are_numbers and len(value) > 1 and sorted(value.values()) == [*range(len(value))]:
        yield sorted(value, key=value.get)  # the names of classes
    columns = dict.values(value) if isinstance(value, dict) else value
    parts = islice(columns, _MANY) if isinstance(value, dict | list | tuple) else ()
    for part in (value, *parts):
        # By the class first, because `ndim` of another object may read a file, or raise.
        is_array = isinstance(part, torch.Tensor) or type(part).__module__ == "numpy"
        dimensions = getattr(part, "ndim", 0) if is_array else isinstance(part, list | tuple)
        if (dimensions == 1 or (floats and dimensions > 1)) and len(part) == length > 0:
            yield part


def _some(entries: Any) -> Any:
    """Return every nth of the entries of a vector, or all if they are small."""
    first = entries[0]
    size = first.nbytes if hasattr(first, "nbytes") else 16 * len(repr(first))
    return entries[:: size // max(_MOST_BYTES // len(entries), 2048) + 1]


def _columns(entries: Any, *, floats: bool) -> Iterator[Any]:
    """Yield the integers and the last names of paths in a list of alike entries, by columns.

    Other entries may be a cache, which differs between ranks.
    """
    dtype = str(getattr(entries, "dtype", "object"))
    if dtype != "object" and "U" not in dtype:
        if re.search("float|int|bool" if floats else "int|bool", dtype):
            yield content_hash(entries)
        return
    kinds = {*map(type, entries)}
    if all(issubclass(kind, str | PurePath) for kind in kinds):
        yield [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]
    elif kinds <= ({int, bool, str, float, type(None)} if floats else {int, bool, str}):
        yield [*entries]
    elif len(kinds) == 1 and hasattr(entries[0], "tolist"):
        if floats:
            yield content_hash([*entries])
        elif not any(entry.ndim for entry in entries):
            yield from _columns([entry.tolist() for entry in entries], floats=floats)
    elif len(kinds) == 1 and isinstance(entries[0], dict | list | tuple):
        rows = [[*chain(*dict.items(one))] if isinstance(one, dict) else one for one in entries]
        yield (sizes := [*map(len, rows)])
        for place in range(max(sizes)):
            yield from _columns([row[place] for row in rows if place < len(row)], floats=floats)


def _paths(name: str, holder: Any, is_wanted: Callable[[Any], bool]) -> Iterator[str]:
    return (path for path, _ in _found(name, holder, is_wanted))


def _found(name: str, holder: Any, is_wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of the wanted objects, in breadth-first order."""
    seen, found = set[int](), [(name, holder, 1)]
    for path, value, depth in found:  # more are appended meanwhile
        if id(value) in seen or depth > _DEEPEST:
            continue
        seen.add(id(value))
        if is_wanted(value):
            yield path, value
        else:
            found += [(*part, depth + 1) for part in _parts(path, value)]


def _parts(path: str, value: Any) -> list[tuple[str, Any]]:
    """Return the attributes or items of an object, but not of a collection with many items.

    It runs no code of the user's, which might open files or draw random numbers.
    """
    if isinstance(value, dict | list | tuple):
        items = dict.items(value) if isinstance(value, dict) else enumerate(value)
        return [(f"{path}[{key!r}]", item) for key, item in items] if len(value) < _MANY else []
    if isinstance(value, torch.Tensor | type | ModuleType) or not type(value).__dictoffset__:
        return []
    return [(f"{path}.{key}", item) for key, item in vars(value).items()]
