"""The sharded tensors of a checkpoint, through PyTorch's own ``torch.distributed.checkpoint``.

Its imports cost half a second, so they are made where they are needed: whoever has a sharded model
has paid for most of them.
"""

import dataclasses
import pickle
from collections.abc import Container, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.checkpoint._manifest import UnusableError

FOLDER = "sharded"

_METADATA = ".metadata"

_CLASSES_FROM = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write this rank's parts. Collective."""
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415

    with failures_as_errors():
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder))


def start_writing(
    folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup
) -> "Future[Any]":
    """Copy this rank's parts, and write them in the background. Collective.

    Args:
        folder: to write in.
        tensors: by name.
        group: of all ranks, for messages between CPUs, that nobody else uses meanwhile.
    """
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415

    writer = dcp.FileSystemWriter(folder)
    # Older PyTorch copies from GPUs only, and would write what training has made of the others.
    own = {name: t.detach().clone() if t.device.type == "cpu" else t for name, t in tensors.items()}
    started: Any = dcp.async_save(own, storage_writer=writer, process_group=group)
    return started  # type: ignore[no-any-return]  # with other arguments it returns another


def read(folder: Path, targets: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return tensors by name, each sharded like its target, or whole where that is None.

    Of a folder that was checked. Collective.
    """
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:  # newer torch passes more
            return metadata

    metadata = _read_metadata(folder)
    stored = metadata.state_dict_metadata
    tensors = {name: _empty(stored[name], target) for name, target in targets.items()}
    with failures_as_errors():
        dcp.load(tensors, storage_reader=Reader(folder))
    return tensors


def check(folder: Path, tensors: Iterable[str], files: Container[str]) -> None:
    """Check that these tensors can be read without running code, from these files alone.

    Raises:
        UnusableError: where not; says why.
    """
    if f"{FOLDER}/{_METADATA}" not in files:
        msg = f"{FOLDER}/{_METADATA} is missing"
        raise UnusableError(msg)
    metadata = _read_metadata(folder)
    missing = [name for name in tensors if name not in metadata.state_dict_metadata]
    if missing:
        msg = f"{FOLDER} must have all sharded tensors, but {missing} are missing"
        raise UnusableError(msg)
    for place in metadata.storage_data.values():
        if f"{FOLDER}/{place.relative_path}" not in files:
            msg = f"{FOLDER} needs {str(place.relative_path)!r}, which is no file in it"
            raise UnusableError(msg)


@contextmanager
def failures_as_errors() -> Iterator[None]:
    """Raise PyTorch's account of which ranks failed, no Exception, as an `OSError`."""
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415

    try:
        yield
    except CheckpointException as failed:
        told = "; ".join(f"rank {rank}: {error[0]!r}" for rank, error in failed.failures.items())
        msg = f"not all ranks could read or write their parts: {told}"
        raise OSError(msg) from failed


def _empty(stored: Any, target: Tensor | None) -> Tensor:
    if target is not None and target.shape == stored.size:
        return torch.empty_like(target, dtype=stored.properties.dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _read_metadata(folder: Path) -> Any:
    """Return what PyTorch has written there as a pickle, without running what it may say."""
    try:
        with (folder / _METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        _check_metadata(metadata)
    except Exception as error:  # whatever comes of a pickle that somebody has made up
        msg = f"{FOLDER} must hold tensors and nothing else, but {error}"
        raise UnusableError(msg) from error
    return metadata


class _Unpickler(pickle.Unpickler):
    """Makes the plain classes of a checkpoint's metadata only."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if _may_be_asked_for(module) else None
        if not (_is_plain_class(found) or isinstance(found, torch.dtype) or found in _others()):
            msg = f"it asks for {module}.{name}, which might run code"
            raise pickle.UnpicklingError(msg)
        return found


def _may_be_asked_for(module: str) -> bool:
    # Not even imported otherwise.
    return module in (*_CLASSES_FROM, "torch", "torch.serialization") or (
        module.partition(".")[0] == "pathlib"
    )


def _is_plain_class(found: object) -> bool:
    """Whether this is a class that is made of data only, and making it does nothing."""
    if not isinstance(found, type):
        return False
    plain = dataclasses.is_dataclass(found) or issubclass(found, Enum)
    return issubclass(found, PurePath) or (plain and found.__module__ in _CLASSES_FROM)


def _others() -> tuple[object, ...]:
    # The last is what a layout is pickled as.
    return torch.Size, torch.serialization._get_layout  # noqa: SLF001


def _check_metadata(metadata: Any) -> None:
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415
        Metadata,
        TensorStorageMetadata,
    )

    if not isinstance(metadata, Metadata):
        msg = f"it holds a {type(metadata).__name__}"
        raise TypeError(msg)
    stored: Mapping[str, Any] = metadata.state_dict_metadata
    for name, kind in stored.items():
        if not isinstance(kind, TensorStorageMetadata):
            msg = f"{name!r} is a {type(kind).__name__}, which might run code"
            raise TypeError(msg)
    for place in metadata.storage_data.values():
        if PurePath(place.relative_path).name != place.relative_path:
            msg = f"{place.relative_path!r} is no name of a file"
            raise ValueError(msg)
