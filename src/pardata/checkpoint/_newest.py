"""Reading checkpoints: the newest that is whole, and what of it this rank needs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pardata.checkpoint import _shards as shards
from pardata.checkpoint import _state as states
from pardata.checkpoint._folder import Name, names
from pardata.checkpoint._manifest import UnusableError, verified
from pardata.checkpoint._writer import STATE
from pardata.collective._agreement import agree
from pardata.collective._rank_zero import rank_zero_call
from pardata.ranks._logger import get_logger
from pardata.ranks._world import World

_log = get_logger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read.

    Attributes:
        path: of its folder.
        name: its own.
        manifest: what was written about it.
        contents: with marks for what is sharded.
    """

    path: Path
    name: Name
    manifest: dict[str, Any]
    contents: states.Tree

    def states_of(self, things: Mapping[str, object | None]) -> dict[str, states.Tree]:
        """Return the states under the names of things, sharded as those are. Collective.

        What is no thing, but None, is read whole.
        """
        found = {name: self.contents["objects"][name] for name in things}
        targets: dict[str, Tensor | None] = {}
        for name, state in found.items():
            targets |= states.sharded_like(name, things[name], states.marks(state))
        tensors = shards.read(self.path / shards.FOLDER, targets) if targets else {}
        return {name: states.joined(state, tensors) for name, state in found.items()}


def newest(here: World, directory: Path) -> Found | None:
    """Read the newest checkpoint that is whole, or return None where there is none. Collective.

    Raises:
        RuntimeError: where there are checkpoints and none is whole.
        FileNotFoundError: on every rank, where one does not see what rank 0 sees.
    """
    kept: list[Found] = []  # rank 0 reads it once

    def choose() -> tuple[Name, str] | None:
        found = _newest(directory)
        if found is None:
            return None
        kept.append(found)
        return found.name, json.dumps(found.manifest, sort_keys=True)

    chosen = rank_zero_call(choose)
    if chosen is None:
        return None
    name, manifest = chosen

    def read() -> dict[str, object]:
        if not kept:
            _check_seen(directory / str(name) / STATE)
            kept.append(_read(directory / str(name), name, json.loads(manifest)))
        return {}

    agree(here, "Checkpointer (reading)", read)
    return kept[0]


def _newest(directory: Path) -> Found | None:
    while True:
        candidates = names(directory)
        passed_over = []
        for name in reversed(candidates):
            path = directory / str(name)
            try:
                return _read(path, name, verified(path))
            except UnusableError as error:
                passed_over.append(f"{name}: {error}")
                _log.warning("passed over the checkpoint %s: %s", path, error)
        if names(directory) == candidates:
            break  # else one was added or removed meanwhile
    if not passed_over:
        return None
    lines = "\n".join(f"  {line}" for line in passed_over)
    msg = (
        f"one of the checkpoints in {directory} must be whole, but none is:\n{lines}\nPut a copy "
        f"back, or remove them to begin anew"
    )
    raise RuntimeError(msg)


def _check_seen(file: Path) -> None:
    if not file.is_file():
        msg = (
            f"every rank must see the checkpoints, but {file} is not there for this one: save to a "
            f"disk that all nodes share"
        )
        raise FileNotFoundError(msg)


def _read(path: Path, name: Name, manifest: dict[str, Any]) -> Found:
    if manifest["step"] != name.step:
        msg = f"it is that of step {manifest['step']}"
        raise UnusableError(msg)
    if STATE not in manifest["files"]:
        msg = f"{STATE} is missing"
        raise UnusableError(msg)
    try:
        contents = torch.load(path / STATE, map_location="cpu", weights_only=True)
        known = _is_known(contents, manifest)
    except Exception as error:  # whatever PyTorch makes of bytes that somebody has made up
        msg = f"{STATE} cannot be read without running code, or at all ({error})"
        raise UnusableError(msg) from error
    if not known:
        msg = f"{STATE} is not a checkpoint's"
        raise UnusableError(msg)
    marked = states.marks(contents["objects"])
    if marked:
        shards.check(path / shards.FOLDER, marked, manifest["files"])
    return Found(path, name, manifest, contents)


def _is_known(contents: Any, manifest: dict[str, Any]) -> bool:
    return (
        isinstance(contents, dict)
        and isinstance(contents["objects"], dict)
        and isinstance(contents["generators"], list)
        and set(manifest["values"]) <= set(contents["objects"])
        and all(isinstance(path, str) for path in states.marks(contents["objects"]))
    )
