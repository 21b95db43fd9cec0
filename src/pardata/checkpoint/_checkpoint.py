"""A checkpoint that was read: the newest that is whole, and what of it this rank needs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pardata.checkpoint import _shards as shards
from pardata.checkpoint._attempt import Name, names
from pardata.checkpoint._manifest import STATE, UnusableError, verified
from pardata.checkpoint._state import sharded_like
from pardata.collective._agreement import agree
from pardata.collective._rank_zero import rank_zero_call
from pardata.ranks._logger import get_logger
from pardata.ranks._world import World

_log = get_logger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read.

    Attributes:
        path: of its folder.
        manifest: what was written about it.
        contents: with marks for what is sharded.
    """

    path: Path
    manifest: dict[str, Any]
    contents: Any

    @property
    def values(self) -> dict[str, Any]:
        """What was saved of things without a state, by name."""
        return {name: self.contents["objects"][name] for name in self.manifest["values"]}

    def check_names(self, wanted: Iterable[str]) -> None:
        """Raise where something is wanted that was not saved as a thing with a state."""
        saved = [name for name in self.contents["objects"] if name not in self.manifest["values"]]
        missing = [name for name in wanted if name not in saved]
        if missing:
            msg = (
                f"what is asked for must have been saved as something with a state, but "
                f"{', '.join(map(repr, missing))} not; the checkpoint {self.path} has "
                f"{', '.join(map(repr, saved)) or 'none'}"
            )
            raise ValueError(msg)

    def states_of(self, things: Mapping[str, object | None]) -> dict[str, Any]:
        """Return the states under the names of things, sharded as those are. Collective.

        What is no thing, but None, is read whole.
        """
        self.check_names(things)
        found = {name: self.contents["objects"][name] for name in things}
        targets: dict[str, Tensor | None] = {}
        for name, state in found.items():
            targets |= sharded_like(name, things[name], shards.marked(state))
        if not targets:
            return found
        tensors = shards.read(self.path, targets)
        return {name: shards.joined(state, tensors) for name, state in found.items()}


def newest(here: World, directory: Path) -> Checkpoint | None:
    """Read the newest checkpoint that is whole, or return None where there is none. Collective.

    Raises:
        RuntimeError: where there are checkpoints and none is whole.
        FileNotFoundError: on every rank, where one does not see what rank 0 sees.
    """
    kept: list[Checkpoint] = []  # rank 0 reads it once

    def choose() -> tuple[Path, dict[str, Any]] | None:
        kept.extend(_newest(directory))
        return (kept[0].path, kept[0].manifest) if kept else None

    chosen = rank_zero_call(choose)
    if chosen is None:
        return None

    def read() -> dict[str, object]:
        if not kept:
            kept.append(_read_elsewhere(*chosen))
        return {}

    agree(here, "Checkpointer (reading)", read)
    return kept[0]


def _newest(directory: Path) -> list[Checkpoint]:
    while True:
        candidates = names(directory)
        passed_over = []
        for name in reversed(candidates):
            path = directory / str(name)
            try:
                return [_read_as(name, path)]
            except UnusableError as error:
                passed_over.append(f"{name}: {error}")
                _log.warning("passed over the checkpoint %s: %s", path, error)
        if names(directory) == candidates:
            break  # else one was added or removed meanwhile
    if not passed_over:
        return []
    lines = "\n".join(f"  {line}" for line in passed_over)
    msg = (
        f"one of the checkpoints in {directory} must be whole, but none is:\n{lines}\nPut a copy "
        f"back, or remove them to begin anew"
    )
    raise RuntimeError(msg)


def _read_as(name: Name, path: Path) -> Checkpoint:
    manifest = verified(path)
    if manifest["step"] != name.step:
        msg = f"it is that of step {manifest['step']}"
        raise UnusableError(msg)
    return _read(path, manifest)


def _read_elsewhere(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    """Read what rank 0 has found and verified."""
    file = path / STATE
    if not file.is_file():
        msg = (
            f"every rank must see the checkpoints, but {file} is not there for this one: save to a "
            f"disk that all nodes share"
        )
        raise FileNotFoundError(msg)
    return _read(path, manifest)


def _read(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    try:
        contents = torch.load(path / STATE, map_location="cpu", weights_only=True)
        has_parts = bool(shards.marked(contents["objects"]))
    except Exception as error:  # whatever PyTorch makes of bytes that somebody has made up
        msg = f"{STATE} cannot be read without running code, or at all ({error})"
        raise UnusableError(msg) from error
    if has_parts:
        shards.check(path, manifest["files"])
    return Checkpoint(path, manifest, contents)
