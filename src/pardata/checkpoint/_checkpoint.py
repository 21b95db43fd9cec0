"""A checkpoint that was read: the newest that is whole, and how things get their state from it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pardata.checkpoint import _shards as shards
from pardata.checkpoint._files import STATE, UnusableError, verified
from pardata.checkpoint._names import Name, names
from pardata.checkpoint._snapshot import copied
from pardata.collective._agreement import agree
from pardata.collective._rank_zero import rank_zero_call
from pardata.collective._tree import Path as TreePath
from pardata.model._unwrap import unwrap
from pardata.model._weights import load_weights
from pardata.ranks._logger import get_logger
from pardata.ranks._table import ranks_text
from pardata.ranks._world import World
from pardata.seeds._generators import restore_generators

_log = get_logger(__name__)

_PATIENCE = timedelta(hours=2)  # with the slowest disk
_ALIKE = 0.8  # of 1, as difflib counts: one of five letters is another one


@dataclass(frozen=True)
class Restored:
    """What `Checkpointer.restore` found: true where there was a checkpoint.

    Attributes:
        step: at which it was saved, and 0 where there was none.
        values: by name, what was saved that has no state of its own; tensors on the CPU.
    """

    step: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    _is_there: bool = field(default=False, repr=False)

    def __bool__(self) -> bool:
        return self._is_there


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

    def give(self, here: World, things: Mapping[str, Any]) -> Restored:
        """Give things their states, and return the rest. Collective.

        What is handed out lies in memory of its own: the file is only mapped.

        Raises:
            ValueError: for a name that was not saved.
            RuntimeError: where a state does not fit its thing.
        """
        states = self._states_of(things)

        def load() -> dict[str, object]:
            for name, thing in things.items():
                _load(name, thing, states[name])
            saved = self.contents["generators"]
            if len(saved) == here.size:
                restore_generators(saved[here.rank].tolist(), here.device)
            else:
                text = "the default generators are left as they are: they were those of %d ranks"
                _log.info(text, len(saved))
            return {}

        agree(here, "Checkpointer.restore (loading)", load)
        self._log_restored()
        objects = self.contents["objects"]
        values = {name: objects[name] for name in self.manifest["values"]}
        return Restored(self.manifest["step"], copied(values), _is_there=True)

    def whole_state_of(self, name: str) -> Any:
        """Return the state that was saved under a name, all of it, on one rank alone."""
        return self._states_of({name: None}, alone=True)[name]

    def _states_of(self, things: Mapping[str, Any], *, alone: bool = False) -> dict[str, Any]:
        """Return the states under the names of things, sharded as those are. Collective or alone.

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
        joined: dict[str, Any] = shards.joined(trees, shards.read(self.path, targets, alone=alone))
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


def newest(here: World, directory: Path, at: int | None) -> Checkpoint | None:
    """Read the newest checkpoint that is whole, of step `at` if given, or None. Collective.

    Raises:
        ValueError: where the step is not there, and where another directory must be meant.
        RuntimeError: where there are checkpoints and none is whole, and where not all ranks see
            what rank 0 sees.
    """
    there = rank_zero_call(_candidates, directory, at)
    while there:
        passed_over = []
        for name in there:
            found = _looked_at(here, directory / str(name), name.step)
            if isinstance(found, Checkpoint):
                return found
            passed_over.append(f"\n  {name}: {found}")
            text = "passed over the checkpoint %s: %s"
            _log.warning(text, directory / str(name), found, ranks=[0])
        before, there = there, rank_zero_call(_candidates, directory, at)
        if there == before:  # else one was added or removed meanwhile
            those = "checkpoints" if at is None else f"checkpoints of step {at}"
            raise RuntimeError(
                f"one of the {those} in {directory} must be whole, but none is:"
                f"{''.join(passed_over)}\nPut a copy back, or remove them to begin anew"
            )
    return None


def _candidates(directory: Path, at: int | None) -> list[Name]:
    """Return the names of all checkpoints, or those of a step, from the newest to the oldest."""
    there = names(directory)[::-1]
    if not there:
        _check_directory(directory)
    found = [name for name in there if at in (None, name.step)]
    if not found and at is not None:
        steps = ", ".join(str(step) for step in sorted({name.step for name in there}))
        raise ValueError(
            f"`at` must be a step of which there is a checkpoint, but is {at}: {directory} has "
            f"{steps or 'none'}"
        )
    return found


def _check_directory(directory: Path) -> None:
    """Raise where a directory without checkpoints must be a mistake, and name what is meant.

    A run that is really new must not be stopped. So beside others a directory is one only if it is
    not there at all, and its name is nearly another's, as "frist"; not if they tell runs from each
    other by numbers or single letters, as "seed-1" and "seed-2", "run-a" and "run-b".
    """
    path = directory.absolute()
    if Name.parse(path.name) is not None:
        raise ValueError(
            f"`directory` must be that of all checkpoints of a run, but {directory} is one of "
            f"them: pass {directory.parent}"
        )
    if path.exists() or not path.parent.is_dir():
        return
    beside = [other.name for other in path.parent.iterdir() if _words(other) != _words(path)]
    for name in get_close_matches(path.name, beside, cutoff=_ALIKE):
        if names(meant := directory.with_name(name)):
            raise ValueError(
                f"`directory` must be where the checkpoints are, but {directory} is not there, and "
                f"{meant} has some: pass that, or make the directory if this is a new run"
            )


def _words(path: Path) -> list[str]:
    return re.findall(r"[^\W\d_]{2,}", path.name)


def _looked_at(here: World, path: Path, step: int) -> Checkpoint | str:
    """Return a checkpoint that is whole, or why it is of no use. Collective.

    The ranks share the files to be verified, for a disk is faster than one of them.
    """
    found: list[Checkpoint] = []

    def look() -> str | None:
        if not path.exists():
            return None
        try:
            found.append(_read(path, verified(path, step, here.rank, here.size)))
        except UnusableError as error:
            return str(error)
        return ""

    def judge(told: list[str | None]) -> str:
        unseeing = [rank for rank, why in enumerate(told) if why is None]
        if unseeing and len(unseeing) < len(told):
            raise RuntimeError(
                f"every rank must see the checkpoints, but {path} is not there for "
                f"{ranks_text(unseeing)}: save to a disk that all nodes share"
            )
        return "it is gone" if unseeing else next(filter(None, told), "")

    return agree(here, "Checkpointer (verifying)", look, judge, _PATIENCE) or found[0]


def _read(path: Path, manifest: dict[str, Any]) -> Checkpoint:
    """Map the file that all ranks read: those of a node share its memory."""
    try:
        file = str(path / STATE)
        contents = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
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

    A module copies its weights; all else may be kept as it is handed over, so it is a copy.

    Raises:
        RuntimeError: says which state does not fit, where the thing itself only stumbles over it.
    """
    try:
        if isinstance(thing, nn.Module):
            for extra in [key for key in tree if str(key).endswith("_extra_state")]:
                tree[extra] = copied(tree[extra])
            load_weights(thing, tree)
        elif isinstance(thing, torch.optim.Optimizer):
            thing.load_state_dict(shards.placed(tree, _likes(thing)))
        else:
            thing.load_state_dict(copied(tree))
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
