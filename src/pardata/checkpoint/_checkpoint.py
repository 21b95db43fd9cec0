"""A checkpoint that was read: the newest that is whole, and how things get their state from it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pardata.checkpoint import _shards as shards
from pardata.checkpoint._files import STATE, UnusableError, verified
from pardata.checkpoint._folder import names
from pardata.collective._agreement import agree
from pardata.collective._rank_zero import rank_zero_call
from pardata.collective._tree import Path as TreePath
from pardata.model._unwrap import unwrap
from pardata.model._weights import load_weights
from pardata.ranks._logger import get_logger
from pardata.ranks._world import World
from pardata.seeds._generators import restore_generators

_log = get_logger(__name__)


class Checkpoint(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        path: of its folder.
        manifest: what was written about it.
        contents: with marks for what is sharded.
        sharded: where the sharded tensors are, and the paths under which they are written.
    """

    path: Path
    manifest: dict[str, Any]
    contents: Any
    sharded: dict[TreePath, str]

    def give(self, here: World, things: Mapping[str, Any]) -> dict[str, Any]:
        """Give things their states, and return the step and the values. Collective.

        Raises:
            ValueError: for a name that was not saved.
            RuntimeError: where a state does not fit its thing.
        """
        states = self.states_of(things)

        def load() -> dict[str, object]:
            for name, thing in things.items():
                _load(name, thing, states[name])
            saved = self.contents["generators"]
            if len(saved) == here.size:
                restore_generators(saved[here.rank], here.device)
            else:
                text = "the default generators are left as they are: they were those of %d ranks"
                _log.info(text, len(saved))
            return {}

        agree(here, "Checkpointer.restore (loading)", load)
        self._log_restored()
        values = {name: self.contents["objects"][name] for name in self.manifest["values"]}
        return {"step": self.manifest["step"], **values}

    def states_of(self, things: Mapping[str, object | None]) -> dict[str, Any]:
        """Return the states under the names of things, sharded as those are. Collective.

        What is no thing, but None, is read whole.
        """
        self._check_names(things)
        trees = {name: self.contents["objects"][name] for name in things}
        wanted = {at: path for at, path in self.sharded.items() if at[0] in trees}
        if not wanted:
            return trees
        likes = {(name, *at): like for name in things for at, like in _likes(things[name]).items()}
        # Of a model it has the very place, of an optimizer that of the parameter's whole state.
        targets = {path: likes.get(at, likes.get(at[:-1])) for at, path in wanted.items()}
        joined: dict[str, Any] = shards.joined(trees, shards.read(self.path, targets))
        return joined

    def _check_names(self, wanted: Iterable[str]) -> None:
        """Raise where something is wanted that was not saved as a thing with a state."""
        saved = [name for name in self.contents["objects"] if name not in self.manifest["values"]]
        missing = [name for name in wanted if name not in saved]
        if missing:
            raise ValueError(
                f"what is asked for must have been saved as something with a state, but "
                f"{', '.join(map(repr, missing))} not; the checkpoint {self.path} has "
                f"{', '.join(map(repr, saved)) or 'none'}"
            )

    def _log_restored(self) -> None:
        saved = self.manifest["identity"]
        strategies = [f", {name} under {kind!r}" for name, kind in saved["strategies"].items()]
        text = "restored step %d of %s, saved by %d process(es)%s with torch %s"
        step, directory, told = self.manifest["step"], self.path.parent, "".join(strategies)
        _log.info(text, step, directory, saved["processes"], told, saved["torch"])


def newest(here: World, directory: Path) -> Checkpoint | None:
    """Read the newest checkpoint that is whole, or return None where there is none. Collective.

    Raises:
        RuntimeError: where there are checkpoints and none is whole.
        FileNotFoundError: on every rank, where one does not see what rank 0 sees.
    """
    kept: list[Checkpoint] = []  # rank 0 reads it once

    def choose() -> list[tuple[Path, dict[str, Any]]]:
        kept.extend(_newest(directory))
        return [(found.path, found.manifest) for found in kept]

    def read() -> dict[str, object]:
        kept[:] = kept or [_read_elsewhere(*found) for found in chosen]
        return {}

    chosen = rank_zero_call(choose)
    if not chosen:
        return None
    agree(here, "Checkpointer (reading)", read)
    return kept[0]


def _newest(directory: Path) -> list[Checkpoint]:
    """Return the newest that is whole, or nothing."""
    while True:
        candidates = names(directory)
        passed_over = []
        for name in reversed(candidates):
            path = directory / str(name)
            try:
                return [_read(path, verified(path, name.step))]
            except UnusableError as error:
                passed_over.append(f"\n  {name}: {error}")
                _log.warning("passed over the checkpoint %s: %s", path, error)
        if names(directory) == candidates:
            break  # else one was added or removed meanwhile
    if not passed_over:
        return []
    raise RuntimeError(
        f"one of the checkpoints in {directory} must be whole, but none is:{''.join(passed_over)}\n"
        f"Put a copy back, or remove them to begin anew"
    )


def _read_elsewhere(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    """Read what rank 0 has found and verified."""
    file = path / STATE
    if not file.is_file():
        raise FileNotFoundError(
            f"every rank must see the checkpoints, but {file} is not there for this one: save to a "
            f"disk that all nodes share"
        )
    return _read(path, manifest)


def _read(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    try:
        contents = torch.load(path / STATE, map_location="cpu", weights_only=True)
        sharded = shards.marked(contents["objects"])
    except Exception as error:  # whatever PyTorch makes of bytes that somebody has made up
        raise UnusableError(
            f"{STATE} cannot be read without running code, or at all ({error})"
        ) from error
    if sharded:
        shards.read_metadata(path)
    return Checkpoint(path, manifest, contents, sharded)


def _load(name: str, thing: Any, tree: Any) -> None:
    """Give a thing its state, of whatever strategy. Collective if sharded.

    Raises:
        RuntimeError: says which state does not fit, where the thing itself only stumbles over it.
    """
    try:
        if isinstance(thing, nn.Module):
            load_weights(thing, tree)
        elif isinstance(thing, torch.optim.Optimizer):
            thing.load_state_dict(shards.distributed(tree, _likes(thing)))
        else:
            thing.load_state_dict(tree)
    except (LookupError, AttributeError, TypeError) as error:
        raise RuntimeError(
            f"what is restored must be like what was saved, but the state of `{name}` is not that "
            f"of a {type(thing).__name__} ({type(error).__name__}: {error})"
        ) from error


def _likes(thing: object) -> dict[TreePath, Tensor]:
    """Return what shows how parts of a thing's state are sharded, by where they are in it."""
    if isinstance(thing, nn.Module):
        return {(name,): value for name, value in unwrap(thing).state_dict().items()}
    if isinstance(thing, torch.optim.Optimizer):
        # In the order by which state_dict() numbers them.
        parameters = [parameter for group in thing.param_groups for parameter in group["params"]]
        return {("state", number): parameter for number, parameter in enumerate(parameters)}
    return {}
