"""The sharded tensors of a checkpoint, through PyTorch's own ``torch.distributed.checkpoint``.

Its imports cost half a second, so they are made where they are needed: whoever has a sharded model
has paid for most of them.
"""

import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FOLDER = "sharded"

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
    started: Any = dcp.async_save(tensors, storage_writer=writer, process_group=group)
    return started  # type: ignore[no-any-return]  # with other arguments it returns another


def read(folder: Path, targets: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return tensors by name, each sharded like its target, or whole where that is None.

    Collective.

    Raises:
        ValueError: where the folder has something else than such tensors.
    """
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:  # newer torch passes more
            return metadata

    metadata = _read_metadata(folder)
    stored = metadata.state_dict_metadata
    missing = [name for name in targets if name not in stored]
    if missing:
        msg = f"{folder} must have all sharded tensors, but {missing} are missing"
        raise ValueError(msg)
    tensors = {name: _empty(stored[name], target) for name, target in targets.items()}
    with failures_as_errors():
        dcp.load(tensors, storage_reader=Reader(folder))
    return tensors


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
    with (folder / ".metadata").open("rb") as file:
        try:
            metadata = _Unpickler(file).load()
            _check_metadata(metadata)
        except (pickle.UnpicklingError, AttributeError, EOFError, ValueError) as error:
            msg = f"{folder} must hold sharded tensors and nothing else, but {error}"
            raise ValueError(msg) from error
    return metadata


class _Unpickler(pickle.Unpickler):
    """Makes the plain classes of a checkpoint's metadata only."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if _may_be_asked_for(module) else None
        is_class = isinstance(found, type) and found.__module__ in _CLASSES_FROM
        is_path = isinstance(found, type) and issubclass(found, PurePath)
        known = isinstance(found, torch.dtype) or found in (torch.Size, _get_layout())
        if not (is_class or is_path or known):
            msg = f"it asks for {module}.{name}, which might run code"
            raise pickle.UnpicklingError(msg)
        return found


def _may_be_asked_for(module: str) -> bool:
    # Not even imported otherwise.
    return module in (*_CLASSES_FROM, "torch", "torch.serialization") or (
        module.partition(".")[0] == "pathlib"
    )


def _get_layout() -> object:
    return torch.serialization._get_layout  # noqa: SLF001  # what a layout is pickled as


def _check_metadata(metadata: Any) -> None:
    from torch.distributed.checkpoint.metadata import (  # noqa: PLC0415
        Metadata,
        TensorStorageMetadata,
    )

    if not isinstance(metadata, Metadata):
        msg = f"it holds a {type(metadata).__name__}"
        raise ValueError(msg)
    stored: Mapping[str, Any] = metadata.state_dict_metadata
    for name, kind in stored.items():
        if not isinstance(kind, TensorStorageMetadata):
            msg = f"{name!r} is a {type(kind).__name__}, which might run code"
            raise ValueError(msg)
    for place in (metadata.storage_data or {}).values():
        if str(PurePath(place.relative_path).name) != str(place.relative_path):
            msg = f"{place.relative_path!r} is no file in it"
            raise ValueError(msg)
