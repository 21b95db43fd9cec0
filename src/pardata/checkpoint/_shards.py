"""The sharded tensors of a checkpoint, through PyTorch's own ``torch.distributed.checkpoint``.

They are written beside the tree of the others, by their paths in it, where a mark stands for each.

PyTorch's imports cost half a second, so they are made where they are needed: whoever has a sharded
model has paid for most of them.
"""

import dataclasses
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pardata.checkpoint._files import UnusableError
from pardata.collective._tree import Path as TreePath
from pardata.collective._tree import is_special, leaves, mapped

_FOLDER = "sharded"

_MARK = "pardata: the sharded tensor "
_METADATA = ".metadata"

_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch",
    "torch.serialization",
)


def distributed(tree: Any, likes: Mapping[TreePath, Tensor]) -> Any:
    """Return a tree whose whole tensors are sharded as `likes` has it for the part they are in."""
    sharded: dict[TreePath, Any] = {at: like for at, like in likes.items() if _is_sharded(like)}
    if not sharded:
        return tree
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415

    def as_like(at: TreePath, leaf: Any) -> Any:
        like = sharded.get(at[:-1])
        is_whole = isinstance(leaf, Tensor) and not _is_sharded(leaf)
        if like is None or not is_whole or leaf.shape != like.shape:
            return leaf
        return distribute_tensor(leaf.to(like.device), like.device_mesh, like.placements)

    return mapped(tree, as_like, is_leaf=is_special)


def mark(path: str) -> str:
    """Return what stands in a tree for the sharded tensor that is written under this path."""
    return _MARK + path


def marked(tree: Any) -> dict[TreePath, str]:
    """Return where a tree's sharded tensors are, and the paths under which they are written."""
    found = leaves(tree, is_leaf=is_special)
    return {at: leaf.removeprefix(_MARK) for at, leaf in found if _is_mark(leaf)}


def joined(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return a tree with sharded tensors, by their paths, in the place of its marks."""

    def filled(_: TreePath, leaf: Any) -> Any:
        return tensors[leaf.removeprefix(_MARK)] if _is_mark(leaf) else leaf

    return mapped(tree, filled, is_leaf=is_special)


def _is_mark(leaf: object) -> bool:
    return isinstance(leaf, str) and leaf.startswith(_MARK)


def writing(
    checkpoint: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None
) -> Callable[[], object]:
    """Return what writes this rank's parts, and raises where any rank failed; all call it.

    Args:
        checkpoint: the folder to write in.
        tensors: by name.
        group: if they are to be copied now, and written in the background: of all ranks, for
            messages between CPUs, that nobody else uses meanwhile. Collective then.
    """
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415

    writer = dcp.FileSystemWriter(checkpoint / _FOLDER)
    finish: Callable[[], object] = partial(dcp.save, tensors, storage_writer=writer)
    if group is not None:
        # Older PyTorch copies from GPUs only, and would write what training has made of the others.
        cpu = torch.device("cpu")
        own = {n: t.detach().clone() if t.device == cpu else t for n, t in tensors.items()}
        started: Any = dcp.async_save(own, storage_writer=writer, process_group=group)
        finish = started.result
    return _failures_as_errors()(finish)


def read(checkpoint: Path, targets: Mapping[str, object]) -> dict[str, Tensor]:
    """Return tensors by name, each sharded like its target, or whole where that is not sharded.

    Of a checkpoint that was checked. Collective.
    """
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:  # newer torch passes more
            return metadata

    metadata = read_metadata(checkpoint)
    stored = metadata.state_dict_metadata
    tensors = {name: _empty(stored[name], target) for name, target in targets.items()}
    with _failures_as_errors():
        dcp.load(tensors, storage_reader=Reader(checkpoint / _FOLDER))
    return tensors


@contextmanager
def _failures_as_errors() -> Iterator[None]:
    """Raise PyTorch's account of which ranks failed, no Exception, as an `OSError`."""
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415

    try:
        yield
    except CheckpointException as failed:
        told = "; ".join(f"rank {rank}: {error[0]!r}" for rank, error in failed.failures.items())
        raise OSError(f"not all ranks could read or write their parts: {told}") from failed


def _empty(stored: Any, target: Any) -> Tensor:
    if _is_sharded(target) and target.shape == stored.size:
        return torch.empty_like(target, dtype=stored.properties.dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _is_sharded(value: object) -> bool:
    """Whether a value is a DTensor, by what it can do: importing its class costs half a second."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def read_metadata(checkpoint: Path) -> Any:
    """Return what PyTorch has written there as a pickle, without running what it may say.

    Raises:
        UnusableError: where that cannot be; says why.
    """
    try:
        with (checkpoint / _FOLDER / _METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        _check_metadata(metadata)
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
        # The last is what a layout is pickled as.
        return isinstance(found, torch.dtype) or found is torch.serialization._get_layout  # noqa: SLF001
    if issubclass(found, PurePath | torch.Size):
        return True
    is_data = dataclasses.is_dataclass(found) or issubclass(found, Enum)
    return is_data and found.__module__ in _MODULES


def _check_metadata(metadata: Any) -> None:
    from torch.distributed.checkpoint import metadata as kinds  # noqa: PLC0415

    stored = metadata.state_dict_metadata if isinstance(metadata, kinds.Metadata) else {"it": None}
    for name, kind in stored.items():
        if not isinstance(kind, kinds.TensorStorageMetadata):
            raise TypeError(f"{name!r} is a {type(kind).__name__}, which might run code")
