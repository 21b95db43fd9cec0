"""The sharded tensors of a checkpoint, through PyTorch's own ``torch.distributed.checkpoint``.

They are written next to the tree of the others, under names that say where they are in it.

PyTorch's imports cost half a second, so they are made where they are needed: whoever has a sharded
model has paid for most of them.
"""

import copyreg
import dataclasses
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from pardata._pytree import KeyPath
from pardata.checkpoint._files import Digests, UnusableError, Written, size_and_digest

_FOLDER = "sharded"
_METADATA = ".metadata"

# What makes a layout of its name, for pickle.
_LAYOUT = copyreg.dispatch_table[torch.layout](torch.strided)[0]

_DCP = "torch.distributed.checkpoint"
_MODULES = ("torch", "torch.serialization", f"{_DCP}.metadata", f"{_DCP}.filesystem")


def placed(tensor: Tensor, like: Any) -> Tensor | None:
    """Return a copy on the device of the parameter `like` to which it belongs, if it does."""
    if like is None or tensor.shape != like.shape:
        return None
    moved = tensor.to(like.device, copy=True)
    if not is_sharded(like):
        return moved
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  # slow to import

    return distribute_tensor(moved, like.device_mesh, like.placements)


def writing(checkpoint: Path, parts: Mapping[KeyPath, Tensor], group: Any) -> Written:
    """Return what writes this rank's parts, and raises if any rank failed; all call it.

    On rank 0 that returns what a manifest records of the files of all ranks.

    Args:
        checkpoint: the folder to write in.
        parts: sharded tensors, by where they are.
        group: if they are to be copied now, and written in the background: of all ranks, for
            messages between CPUs, that nobody else uses meanwhile.
    """
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415  # slow to import

    digests: dict[str, tuple[int, str]] = {}
    folder = checkpoint / _FOLDER

    class Writer(dcp.FileSystemWriter):
        """Each rank reads its own files for their digests, which travel with its report."""

        def write_data(self, *args: Any) -> Any:
            written: Any = super().write_data(*args)
            report = written.wait()
            files = {result.storage_data.relative_path for result in report}
            report.append({f"{_FOLDER}/{file}": size_and_digest(folder / file) for file in files})
            return written

        def finish(self, metadata: Any, results: Any) -> None:
            for report in results:
                digests.update(report.pop())
            super().finish(metadata, results)

    tensors = {str(at): part for at, part in parts.items()}
    if group is not None:
        tensors = {name: part.detach().to("cpu", copy=True) for name, part in tensors.items()}

    def write() -> Digests:
        with _failures_as_errors():
            dcp.save(tensors, storage_writer=Writer(folder), process_group=group)
        return digests

    return write


def read(path: Path, targets: Mapping[KeyPath, Any]) -> dict[KeyPath, Tensor]:
    """Return tensors by path, each sharded like its target, or whole if that is not sharded.

    Of a checkpoint that was checked. Collective.
    """
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415  # slow to import

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:  # newer torch passes more
            return metadata

    metadata = read_metadata(path)
    stored = metadata.state_dict_metadata
    tensors = {str(at): _empty(stored[str(at)], target) for at, target in targets.items()}
    with _failures_as_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # … not there, in one process
        dcp.load(tensors, storage_reader=Reader(path / _FOLDER))
    return {at: tensors[str(at)] for at in targets}


@contextmanager
def _failures_as_errors() -> Iterator[None]:
    """Raise PyTorch's account of which ranks failed, no Exception, as an `OSError`."""
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415  # slow to import

    try:
        yield
    except CheckpointException as failed:
        reasons = "; ".join(f"rank {rank}: {error[0]!r}" for rank, error in failed.failures.items())
        raise OSError(f"not all ranks could read or write their parts: {reasons}") from failed


def _empty(stored: Any, target: Any) -> Tensor:
    if is_sharded(target) and target.shape == stored.size:
        return torch.empty_like(target, dtype=stored.properties.dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")


def is_sharded(value: object) -> bool:
    """Whether a value is a DTensor, by what it can do: importing its class costs half a second."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def read_metadata(checkpoint: Path) -> Any:
    """Return what PyTorch has written there as a pickle, without running what it may say.

    Raises:
        UnusableError: if that cannot be; says why.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: PLC0415  # slow to import

    try:
        with (checkpoint / _FOLDER / _METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        for name, kind in metadata.state_dict_metadata.items():
            if not isinstance(kind, TensorStorageMetadata):
                raise TypeError(f"{name!r} is a {type(kind).__name__}, which might run code")
    except Exception as error:  # whatever comes of a pickle that somebody has made up
        raise UnusableError(f"{_FOLDER} must hold tensors and nothing else, but {error}") from error
    return metadata


class _Unpickler(pickle.Unpickler):
    """Makes the plain classes of a checkpoint's metadata only."""

    def find_class(self, module: str, name: str) -> Any:
        # Not even imported otherwise.
        if module in _MODULES or module.partition(".")[0] == "pathlib":
            found = super().find_class(module, name)
            if _is_plain(found):
                return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which might run code")


def _is_plain(found: object) -> bool:
    """Whether this is a constant, or a class of data only, of which making one does nothing."""
    if not isinstance(found, type):
        return isinstance(found, torch.dtype) or found is _LAYOUT
    is_data = dataclasses.is_dataclass(found) or issubclass(found, Enum)
    return issubclass(found, PurePath | torch.Size) or (is_data and found.__module__ in _MODULES)
