"""The source dataset of a cache: its signature, its samples as tensors.

Does not see a change of the source that shows in none of its lists, nor of its 8 probed samples.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Subset

from pardata._pytree import bytes_of, content_hash, keystr, leaves_with_path, map_with_path
from pardata._validation import type_with_article
from pardata.data._batched_read import datasets_in
from pardata.data._held_objects import listed_samples
from pardata.data._step_source import resolve_num_workers
from pardata.environment._logger import get_logger
from pardata.environment._world import World, cpus_per_rank
from pardata.rng._rng_state import numpy_or_none, seed_generators
from pardata.rng._seeds import mix
from pardata.store._rank_errors import type_and_message

_log = get_logger(__name__)

CHUNK = 64  # samples that a worker decodes at once
_WORTH_WORKERS = 16 * CHUNK  # samples; with fewer, processes cost more than they bring
_VERSION = 3
_RANDOM = "the samples of %s differ at each reading: move random transforms to `batch_transform`"
_LOOKED_AT = 8  # samples, spread evenly, whose contents are part of the signature
_BANDS = ("L", "RGB", "RGBA", "CMYK", "YCbCr", "LA")  # image modes of 8 bits a band

# An empty tensor for each part of a sample, by path: its dtype and number of dimensions.
Fields: TypeAlias = dict[str, Tensor]

_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}  # a bool is an int, too


def num_decoders(num_workers: Any, dataset: Any, world: World) -> int:
    """Return the number of processes that decode."""
    if num_workers != "auto":
        return resolve_num_workers(num_workers, dataset, world)
    cores = cpus_per_rank(1)  # the other ranks wait: theirs are free
    return cores if cores > 1 and len(dataset) >= _WORTH_WORKERS else 0


def read_sample(dataset: Any, index: int, seed: int = 0) -> tuple[Any, dict[str, Tensor]]:
    """Return a sample as the dataset returns it, and its parts as tensors.

    It is read under a seed of its index, so the cache does not depend on the process that reads it.
    The caller restores the default generators.

    Raises:
        RuntimeError: a sample cannot be read, or a part of it cannot be stored.
    """
    seed_generators(mix(seed, index))
    try:
        sample = dataset[index]
        return sample, to_tensors(sample)  # an image file is decoded only now
    except Exception as error:  # user code may raise anything
        raise RuntimeError(f"sample {index} cannot be cached: {type_and_message(error)}") from error


def source_signature(dataset: Any) -> dict[str, Any]:
    """Return the signature that a cache of this source has; warn on rank 0 if it is random."""
    if not (length := len(dataset)):
        raise ValueError("`dataset` must have a sample to be cached, but has none")
    listed = listed_samples(dataset, floats=True)
    subsets = [layer for layer in datasets_in(dataset) if isinstance(layer, Subset)]
    indices = [content_hash(torch.as_tensor(subset.indices, device="cpu")) for subset in subsets]
    probed = sorted({i * (length - 1) // (_LOOKED_AT - 1) for i in range(_LOOKED_AT)})

    def digests(seed: int) -> list[str]:
        return [content_hash(read_sample(dataset, index, seed)[1]) for index in probed]

    contents = digests(0)
    if digests(1) != contents:
        _log.warning(_RANDOM, type(dataset).__name__, ranks=[0])
        if digests(0) != contents:  # they would differ in every run
            contents = []
    facts = {"version": _VERSION, "length": length, "class": class_name(dataset)}
    facts |= {"transform": _transform_text(dataset), "indices": indices, "listed": listed}
    return {**facts, "contents": contents}


def class_name(dataset: Any) -> str:
    """Return the class of a dataset, and of those inside it."""
    kinds = [type(layer) for layer in datasets_in(dataset)]
    return " of ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


def _transform_text(dataset: Any) -> str:
    names = ("transform", "target_transform")
    transforms = [getattr(layer, name, None) for layer in datasets_in(dataset) for name in names]
    return re.sub(r" at 0x[0-9a-fA-F]+", "", " ".join(map(repr, transforms)))


def is_numbers(part: Any) -> bool:
    """Whether this is a list of numbers of one type, as the tokens of a text: it is one part."""
    return type(part) is list and {*map(type, part)} in ({bool}, {int}, {float}, set())


def to_tensors(sample: Any) -> dict[str, Tensor]:
    """Return each part of `sample` as a tensor, by its path, as ``sample[0]['box']``.

    Raises:
        TypeError: a part, which the error names, cannot be stored, or the sample has no parts.
    """
    leaves = leaves_with_path(sample, is_leaf=is_numbers)
    if not leaves:
        raise TypeError(f"`sample` must have at least one part, but is {sample!r}")
    return {(name := keystr("sample", path)): _as_tensor(leaf, name) for path, leaf in leaves}


def check_structure(parts: Mapping[str, Tensor], fields: Fields, number: int) -> None:
    """Raise if a sample differs from the first in its parts, their dtypes or numbers of dimensions.

    A part without values may have any dtype, because an empty list has none.
    """
    for path in {**fields, **parts}:
        first, part = fields.get(path), parts.get(path)
        if first is not None and part is not None and first.ndim == part.ndim:
            part = part if part.numel() else part.to(first.dtype)
        if _kind_of(part) != _kind_of(first):
            raise ValueError(
                f"sample {number} cannot be cached: `{path}` must be {_kind_of(first)}, as in the "
                f"first sample, but is {_kind_of(part)}: make all samples alike in the transform"
            )


def from_tensors(template: Any, parts: Iterable[Tensor]) -> Any:
    """Return a sample with these parts, converted to the types of `template`.

    Tensors, arrays, bytes, numbers and lists of them keep their types; an image stays a tensor.
    """
    rest = iter(parts)
    return map_with_path(template, lambda _, leaf: _of_kind(leaf, next(rest)), is_leaf=is_numbers)


def _of_kind(leaf: Any, tensor: Tensor) -> Any:
    """Return `tensor` converted to the type of `leaf`."""
    if isinstance(leaf, bytes):
        return bytes(bytes_of(tensor))
    if hasattr(leaf, "dtype") and not isinstance(leaf, Tensor):
        array = tensor.numpy()
        return array[()] if isinstance(leaf, numpy_or_none().generic) else array
    return tensor.tolist() if isinstance(leaf, int | float | list) else tensor


def _as_tensor(leaf: Any, path: str) -> Tensor:
    """Return a part of a sample as a tensor: an image as uint8 of shape (bands, height, width).

    Raises:
        TypeError: the part cannot be stored.
    """
    what = type_with_article(leaf)
    try:
        if type(leaf).__module__.startswith("PIL.") and hasattr(leaf, "mode"):
            what += f" of mode {leaf.mode}"
            if leaf.mode in _BANDS:
                width, height = leaf.size
                return _of_bytes(leaf.tobytes()).view(height, width, -1).permute(2, 0, 1)
        elif isinstance(leaf, Tensor):
            what += " that is sparse, quantized or nested"
            if leaf.layout == torch.strided and not (leaf.is_quantized or leaf.is_nested):
                return leaf.detach().cpu()
        elif hasattr(leaf, "__array__") and hasattr(leaf, "dtype"):
            # A copy in C order and native byte order: PyTorch requires both, and warns of read-only
            # arrays.
            plain = leaf.__array__()
            return torch.from_numpy(plain.astype(plain.dtype.newbyteorder("="), order="C"))
        elif isinstance(leaf, bytes):
            return _of_bytes(leaf)
        elif isinstance(leaf, int | float) or is_numbers(leaf):
            number = next(iter(leaf), 0) if isinstance(leaf, list) else leaf
            dtype = next(_DTYPES[kind] for kind in _DTYPES if isinstance(number, kind))
            return torch.tensor(leaf, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        what += f" ({error})"
    raise TypeError(
        f"`{path}` must be a dense tensor, an array, an image of 8 bits a band, bytes, a number or "
        f"a list of numbers of one type, but is {what}: convert it in the dataset, or leave it out"
    )


def _of_bytes(values: bytes) -> Tensor:
    if not values:  # PyTorch makes no tensor of no bytes
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(values), dtype=torch.uint8)


def _kind_of(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{tensor.ndim}-dimensional {str(tensor.dtype).removeprefix('torch.')}"
