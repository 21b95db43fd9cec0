"""The sharded tensors of a checkpoint, through PyTorch's own ``torch.distributed.checkpoint``.

They are written next to the tree of the others, under names that say where they are in it.

PyTorch's imports cost half a second, so they are made where they are needed: whoever has a sharded
model has paid for most of them.
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

PER_RANK_FILE = "rank-{:05d}.pt"  # what a rank has of its own

_FOLDER = "sharded"


def shard_like(leaf: Any, template: Any) -> Any:
    """Return a tensor sharded like the parameter to which it belongs, if both have one shape."""
    if not isinstance(leaf, Tensor) or template is None or leaf.shape != template.shape:
        return leaf
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  # slow to import

    return distribute_tensor(leaf.to(template.device), template.device_mesh, template.placements)


def write(
    world: World, checkpoint: Path, parts: Mapping[KeyPath, Tensor], per_rank: Any, group: Any
) -> tuple[Any, dict[str, Record]]:
    """Write this rank's parts of tensors, and what it has of its own. Collective.

    Args:
        world: this process.
        checkpoint: the folder to write in.
        parts: sharded tensors, by where they are.
        per_rank: what this rank alone has, or nothing.
        group: of all ranks, for messages between CPUs, that nobody else uses meanwhile.

    Returns:
        On rank 0 PyTorch's metadata of the parts, and the records of the files of all ranks.

    Raises:
        OSError: on rank 0, if any rank failed.
    """
    folder, records, why = checkpoint / _FOLDER, dict[str, Record](), ""
    metadata: Any = None
    if parts:
        import torch.distributed.checkpoint as dcp  # noqa: PLC0415  # slow to import

        tensors: dict[str, Any] = {str(at): part for at, part in parts.items()}
        with _failures_as_os_errors():
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), process_group=group)
    try:
        if parts and world.is_main:
            import torch.distributed.checkpoint as dcp  # noqa: PLC0415  # slow to import

            # From the file: torch 2.9 returns it without the places of the parts.
            metadata = dcp.FileSystemReader(folder).read_metadata()
            metadata.storage_meta = None  # its path is no more that of the checkpoint
        for path in folder.glob(f"__{world.rank}_*"):  # as PyTorch names a rank's
            records[f"{_FOLDER}/{path.name}"] = record_of(path)
        if per_rank:
            name = PER_RANK_FILE.format(world.rank)
            records[name] = save(per_rank, checkpoint / name)
    except Exception as error:  # noqa: BLE001  # whatever it is, rank 0 waits for this one
        why = f"rank {world.rank}: {error!r}"
    reports = gather_to_rank_zero(world, (records, why), group)
    if failed := "; ".join(why for _, why in reports if why):
        raise OSError(f"every rank must write what it has of its own, but not all could: {failed}")
    return metadata, {file: record for written, _ in reports for file, record in written.items()}


def read(path: Path, metadata: Any, targets: Mapping[KeyPath, Any]) -> dict[KeyPath, Tensor]:
    """Return tensors by path, each sharded like its target, or whole if that is not sharded.

    Of a checkpoint that was checked. Collective.
    """
    import torch.distributed.checkpoint as dcp  # noqa: PLC0415  # slow to import

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *_: Any, **__: Any) -> Any:  # newer torch passes more
            return metadata

    stored = metadata.state_dict_metadata
    tensors = {str(at): _empty(stored[str(at)], target) for at, target in targets.items()}
    with _failures_as_os_errors(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # … not there, in one process
        dcp.load(tensors, storage_reader=Reader(path / _FOLDER))
    return {at: tensors[str(at)] for at in targets}


@contextmanager
def _failures_as_os_errors() -> Iterator[None]:
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


def metadata_classes(checkpoint: Path) -> list[Any]:
    """Return the classes of metadata that a checkpoint may have: of data, which run no code.

    Without that of bytes, which PyTorch would unpickle.
    """
    if not (checkpoint / _FOLDER).exists():
        return []
    from torch.distributed.checkpoint import filesystem, metadata  # noqa: PLC0415  # slow to import

    return [
        kind
        for module in (metadata, filesystem)
        for kind in vars(module).values()
        if getattr(kind, "__module__", None) == module.__name__
        and (dataclasses.is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, Enum)))
        and kind is not metadata.BytesStorageMetadata
    ]
