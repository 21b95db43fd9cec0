"""The sharded tensors of a checkpoint, through PyTorch's own ``torch.distributed.checkpoint``.

They are written to a folder next to the file of all other state, under the text of their paths.

Functions import PyTorch's modules, which take half a second. With a sharded model most of them are
imported already.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pardata._pytree import KeyPath
from pardata.checkpoint._manifest import Record, record_of, save
from pardata.collectives._all_gather import gather_to_rank_zero
from pardata.environment._world import World

PER_RANK_FILE = "rank-{:05d}.pt"  # the file of a rank's `per_rank` objects

_FOLDER = "sharded"
_PLAIN = [f"torch.distributed.checkpoint.{name}" for name in ("metadata", "filesystem")]


def write(
    world: World, checkpoint: Path, parts: Mapping[KeyPath, Tensor], per_rank: Any, group: Any
) -> tuple[Any, dict[str, Record]]:
    """Write this rank's shards and its `per_rank` objects. Collective.

    Args:
        world: the world of this process.
        checkpoint: the folder of the checkpoint.
        parts: sharded tensors by path.
        per_rank: the `per_rank` objects of this rank, may be empty.
        group: a CPU group of all ranks that no other thread uses during the call.

    Returns:
        On rank 0 PyTorch's metadata of the shards, and the records of the files of all ranks.

    Raises:
        OSError: on rank 0: any rank failed.
    """
    folder, records, why = checkpoint / _FOLDER, dict[str, Record](), ""
    metadata = reader = None
    if parts:
        import torch.distributed.checkpoint as dcp  # noqa: PLC0415  # slow to import

        reader = dcp.FileSystemReader(folder)
        tensors: dict[str, Any] = {str(at): part for at, part in parts.items()}
        with _failures_as_os_errors():
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), process_group=group)
    try:
        if reader is not None and world.is_main:
            # From the file: `dcp.save` of torch 2.11 returns it without `storage_data`.
            metadata = reader.read_metadata()
            metadata.storage_meta = None  # it holds the path of the temporary folder
        for path in folder.glob(f"__{world.rank}_*"):  # PyTorch's names of a rank's files
            records[f"{_FOLDER}/{path.name}"] = record_of(path)
        if per_rank:
            name = PER_RANK_FILE.format(world.rank)
            records[name] = save(per_rank, checkpoint / name)
    except Exception as error:  # noqa: BLE001  # rank 0 waits for this rank
        why = f"rank {world.rank}: {error!r}"
    reports = gather_to_rank_zero(world, (records, why), group)
    if failed := "; ".join(why for _, why in reports if why):
        raise OSError(f"every rank must write what it has of its own, but not all could: {failed}")
    return metadata, {file: record for written, _ in reports for file, record in written.items()}


def read(path: Path, metadata: Any, targets: Mapping[KeyPath, Any]) -> dict[KeyPath, Tensor]:
    """Return tensors by path, each sharded like its target, or full if the target is not sharded.

    The checkpoint must have been verified. Collective.
    """
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415  # slow to import

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:  # newer torch passes more arguments
            return metadata

    stored = metadata.state_dict_metadata
    tensors = {str(at): _empty(stored[str(at)], target) for at, target in targets.items()}
    with _failures_as_os_errors(), warnings.catch_warnings():
        # In one process it warns that there is no group.
        warnings.filterwarnings("ignore", "torch.distributed is")
        dcp.load(tensors, storage_reader=Reader(path / _FOLDER))
    return {at: tensors[str(at)] for at in targets}


@contextmanager
def _failures_as_os_errors() -> Iterator[None]:
    """Raise an `OSError` in place of PyTorch's `CheckpointException`, which is no `Exception`."""
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
    """Whether a value is a DTensor, by an attribute: importing the class takes half a second."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def metadata_classes(checkpoint: Path) -> list[Any]:
    """Return the metadata classes to unpickle: dataclasses and enums, which run no code.

    Without `BytesStorageMetadata`, whose bytes PyTorch would unpickle.
    """
    if not (checkpoint / _FOLDER).exists():
        return []
    from torch.distributed.checkpoint import filesystem, metadata  # noqa: PLC0415  # slow to import

    everything = [*vars(metadata).values(), *vars(filesystem).values()]
    kinds = {one for one in everything if isinstance(one, type) and one.__module__ in _PLAIN}
    kinds.remove(metadata.BytesStorageMetadata)
    return [one for one in kinds if dataclasses.is_dataclass(one) or issubclass(one, Enum)]
