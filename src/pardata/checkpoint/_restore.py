"""Restoring: find the newest complete checkpoint, read it, and load the states of objects.

Does not change the directory, so an evaluation can restore during a training.
"""

import warnings
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.serialization import safe_globals
from torch.utils.data import DataLoader

from pardata._pytree import KeyPath, is_custom_container, map_with_path
from pardata.checkpoint import _dcp as shards
from pardata.checkpoint._directory import At, CheckpointDirectory
from pardata.checkpoint._manifest import STATE, UnusableError, verified
from pardata.checkpoint._snapshot import numbered_parameters, parameter_names
from pardata.collectives._barrier import rank_zero_call
from pardata.data._loader import Loader
from pardata.environment._logger import get_logger
from pardata.environment._world import World, store_client
from pardata.model._state_dict import shard_like
from pardata.model._unwrap import unwrap
from pardata.rng._rng_state import set_rng_state
from pardata.store._rank_errors import format_ranks, is_secondary
from pardata.store._round import exchange
from pardata.strategies._weights import load_weights

_log = get_logger(__name__)

_PATIENCE = timedelta(hours=2)  # verification of a large checkpoint on a slow disk


# Sharded parameters, by the path in a state of the tensors that are sharded like them.
Templates: TypeAlias = dict[KeyPath, Tensor]


@dataclass(frozen=True)
class Restored:
    """The result of `Checkpointer.restore`; true if there was a checkpoint.

    Attributes:
        step: the step of the checkpoint; 0 if there was none.
        values: the saved values by name, with tensors on the CPU. Values saved `per_rank` are this
            rank's, and missing if the number of ranks differs from the save's.
    """

    step: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    _was_found: bool = field(default=False, repr=False)

    def __bool__(self) -> bool:
        return self._was_found


class LoadedCheckpoint(NamedTuple):
    """A checkpoint in memory, or mapped from its file.

    Attributes:
        path: its folder.
        manifest: its manifest.
        objects: the states and values, by name.
        sharded: the paths of the sharded tensors in `objects`.
        generators: of each rank, the states of the default generators at the save, and at the start
            of the body of `Loader.epochs`, None outside of one.
        parameters: the names of each optimizer's parameters.
        metadata: PyTorch's metadata of the sharded tensors.
    """

    path: Path
    manifest: dict[str, Any]
    objects: dict[str, Any]
    sharded: list[KeyPath]
    generators: list[tuple[Any, Any]]
    parameters: dict[str, list[str | None]]
    metadata: Any = None

    def apply(self, world: World, things: Mapping[str, Any], templates: Templates) -> Restored:
        """Load the states of `things`, and return the values. Collective.

        Args:
            world: the world of this process.
            things: the objects by name.
            templates: the sharded parameters, by the paths of tensors to be sharded like them.

        Raises:
            ValueError: a name was not saved.
            RuntimeError: a state does not fit its object.
        """
        saved = self.generators
        unavailable = [name for name in self.manifest["per_rank"] if name not in self.objects]
        things = {name: thing for name, thing in things.items() if name not in unavailable}
        values = [name for name in self.manifest["values"] if name in self.objects]
        self._require(things)
        trees = self.trees_of(things, values, templates)
        # With a loader among the objects the run resumes. Without one only weights are restored.
        loaders = [one for one in things.values() if isinstance(one, Loader | DataLoader)]
        is_alike = len(saved) == world.size

        def load() -> None:
            self._check_parameters(things)
            for name, thing in things.items():
                _load(name, thing, trees[name])
            if loaders:
                states, start = saved[world.rank if is_alike else 0]
                set_rng_state(states, world.device, only_seed=not is_alike)
                for loader in (one for one in loaders if isinstance(one, Loader)):
                    loader.cursor.generators = (start, states) if is_alike and start else None

        exchange(store_client(), "Checkpointer.restore (loading)", load)
        self._report(world, unavailable)
        if loaders and not is_alike:
            text = "the seed is restored, but no random generators: %d process(es) saved theirs"
            _log.info(f"{text}, and there are %d now", len(saved), world.size)
        return Restored(self.manifest["step"], {n: trees[n] for n in values}, _was_found=True)

    def _require(self, names: Iterable[str]) -> None:
        """Raise a `ValueError` for a name that was not saved with a state."""
        saved = [name for name in self.objects if name not in self.manifest["values"]]
        if missing := ", ".join(repr(name) for name in names if name not in saved):
            msg = f"{self.path} has no state {missing}, but {', '.join(map(repr, saved)) or 'none'}"
            raise ValueError(msg)

    def _check_parameters(self, things: Mapping[str, Any]) -> None:
        """Raise if an optimizer numbers its parameters in another order than at the save."""
        for name, now in parameter_names(things).items():
            pairs = zip(self.parameters.get(name, ()), now, strict=False)
            for number, (was, one) in enumerate(pairs):
                if was != one and None not in (was, one):
                    msg = f"the parameters of `{name}` must keep their order, but number {number} "
                    msg += f"was `{was}` and is `{one}`: make its groups from lists, not from a set"
                    raise RuntimeError(msg)

    def _report(self, world: World, unavailable: list[str]) -> None:
        """Log the restored step, and the names that are not restored."""
        step, processes = self.manifest["step"], self.manifest["processes"]
        text = "pardata restored step %d of %s, saved by %d process(es) with torch %s"
        _log.info(text, step, self.path.parent, processes, self.manifest["torch"])
        if unavailable:
            text = "pardata restored no %s: each of %d process(es) saved its own, now there are %d"
            names = ", ".join(f"`{name}`" for name in unavailable)
            _log.warning(text, names, processes, world.size, ranks=[0])

    def trees_of(self, things: Mapping[str, Any], values: list[str], templates: Templates) -> Any:
        """Return the states of `things` and the `values`, all copied but weights. Collective."""
        names = [*things, *values]
        sharded = [at for at in self.sharded if at[0] in names]
        # A model's tensor has the path of the parameter, an optimizer's the path of the parameter's
        # state.
        targets = {at: templates.get(at, templates.get(at[:-1])) for at in sharded}
        tensors = shards.read(self.path, self.metadata, targets) if targets else {}

        def place(at: KeyPath, leaf: Any) -> Any:
            if at[0] in modules and str(at[1]).endswith("_extra_state"):
                return deepcopy(leaf)
            return tensors[at] if at in tensors else shard_like(leaf, templates.get(at[:-1]))

        # One `deepcopy`, so that tensors that share memory still do. `load_state_dict` copies the
        # weights of a module, but not its extra state.
        modules = [name for name, thing in things.items() if isinstance(thing, nn.Module)]
        copied = deepcopy({name: self.objects[name] for name in names if name not in modules})
        trees = {**copied, **{name: self.objects[name] for name in modules}}
        return map_with_path(trees, place, is_leaf=is_custom_container)


def load_latest(world: World, folder: CheckpointDirectory, at: At) -> LoadedCheckpoint | None:
    """Read the newest complete checkpoint, at `at` if given, or return None. Collective.

    Raises:
        ValueError: there is no checkpoint of the step, or the directory is a checkpoint itself.
        RuntimeError: there are checkpoints and none is complete, or some ranks do not see the
            files.
    """
    skipped = ""
    for name in (names := rank_zero_call(folder.newest_first, at)):
        path = folder.directory / str(name)
        found = _looked_at(world, path, name.step)
        if isinstance(found, LoadedCheckpoint):
            return found
        skipped += f"\n  {name}: {found}"
        _log.warning("checkpoint %s was skipped because %s", path, found, ranks=[0])
    if skipped:
        those = "checkpoints" if at is None else f"checkpoints of step {names[0].step}"
        msg = f"one of the {those} in {folder.directory} must be complete, but none"
        raise RuntimeError(f"{msg} is:{skipped}\nPut a copy back, or remove them to begin anew")
    return None


def _looked_at(world: World, path: Path, step: int) -> LoadedCheckpoint | str:
    """Return a complete checkpoint, or the reason why it is unusable. Collective.

    Each rank verifies a part of the files, because one rank reads more slowly than a disk.
    """
    read: list[LoadedCheckpoint] = []

    def look() -> str | None:
        if not path.exists():
            return None
        try:
            read.append(_read(path, verified(path, step, world.rank, world.size), world))
        except UnusableError as error:
            return str(error)
        return ""

    def decide(reasons: list[str | None]) -> str:
        unseeing = [rank for rank, why in enumerate(reasons) if why is None]
        if unseeing and len(unseeing) < len(reasons):
            msg = f"{path} is not there for {format_ranks(unseeing)}: save to a disk of all nodes"
            raise RuntimeError(msg)
        return "it is gone" if unseeing else next(filter(None, reasons), "")

    return exchange(store_client(), "Checkpointer (verifying)", look, decide, _PATIENCE) or read[0]


def _read(path: Path, manifest: dict[str, Any], world: World) -> LoadedCheckpoint:
    """Memory-map the common file, whose pages the ranks of a node share, and this rank's file."""
    load = partial(torch.load, map_location="cpu", weights_only=True, mmap=True)
    try:
        # torch warns when it validates a sparse tensor, or, in 2.11, does not. Where warnings are
        # errors, the checkpoint would count as unusable.
        with warnings.catch_warnings(), safe_globals(shards.metadata_classes(path)):
            warnings.filterwarnings("ignore", "Validating sparse tensor|Sparse invariant checks")
            contents = load(path / STATE)
            if manifest["per_rank"] and manifest["processes"] == world.size:
                contents["objects"].update(load(path / shards.PER_RANK_FILE.format(world.rank)))
            return LoadedCheckpoint(path, manifest, **contents)
    except Exception as error:  # PyTorch may raise anything for a forged file
        msg = f"{STATE} cannot be read without running code, or at all ({error})"
        raise UnusableError(msg) from error


def _load(name: str, thing: Any, tree: Any) -> None:
    """Load the state of an object, under any strategy. Collective if it is sharded.

    Raises:
        RuntimeError: the state does not fit; the error names the object.
    """
    try:
        if isinstance(thing, nn.Module):
            load_weights(thing, tree)
        else:
            thing.load_state_dict(tree)
    except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        if is_secondary(error):
            raise
        msg = f"the state of `{name}` must fit this {type(thing).__name__}, but does not"
        msg += f" ({type(error).__name__}: {error}): make all objects anew, as they were saved"
        raise RuntimeError(msg) from error


def sharding_templates(things: Mapping[str, object]) -> Templates:
    """Return the sharded parameters, by the paths of the tensors to be sharded like them."""
    templates: Templates = {}
    for name, thing in things.items():
        if isinstance(thing, nn.Module):
            templates |= {(name, key): value for key, value in unwrap(thing).state_dict().items()}
        if isinstance(thing, torch.optim.Optimizer):
            numbered = enumerate(numbered_parameters(thing))
            templates |= {(name, "state", number): parameter for number, parameter in numbered}
    return {at: parameter for at, parameter in templates.items() if shards.is_sharded(parameter)}
