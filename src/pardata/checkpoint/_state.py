"""The states of things: taken at one moment as trees that can be written, and given back."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from pardata.checkpoint import _shards as shards
from pardata.checkpoint._safe_types import require_safe
from pardata.collective._tree import Path, is_special, mapped
from pardata.model import _replica
from pardata.model._unwrap import unwrap
from pardata.model._weights import load_weights
from pardata.ranks._version import __version__
from pardata.ranks._world import World


class Snapshot:
    """What is taken of objects: the states of those that have one, the others as they are.

    Attributes:
        trees: by name, with marks for what is sharded.
        parts: sharded tensors, by their paths.
        texts: what must be the same on every rank, by its path; of tensors only their kind.
        facts: what the manifest says of the objects.
    """

    def __init__(self) -> None:
        self.trees: dict[str, Any] = {}
        self.parts: dict[str, Tensor] = {}
        self.texts: dict[str, str] = {}
        self.facts: dict[str, Any] = {}

    def take(self, here: World, objects: Mapping[str, object], *, copy: bool) -> None:
        """Take what there is now, in memory of its own if it is to be a copy.

        Raises:
            TypeError: where an object holds what no checkpoint may: names it.
        """
        stateful = {name for name, thing in objects.items() if is_stateful(thing)}
        states = {n: state_dict_of(o) if n in stateful else o for n, o in objects.items()}
        self.trees = mapped(states, self._take_leaf, is_leaf=is_special)
        require_safe(self.trees)
        if copy:
            # The others are freed here, before a thread writes: with each that was freed beside it,
            # the caller would give way to it, and it may hold the interpreter for 30 ms.
            self.trees = copied(self.trees)
        strategies = {name: strategy_of(thing) for name, thing in objects.items()}
        self.facts = {
            "values": [name for name in objects if name not in stateful],
            "identity": {
                "pardata": __version__,
                "torch": str(torch.__version__),
                "processes": here.size,
                "threads": torch.get_num_threads(),
                "strategies": {name: kind for name, kind in strategies.items() if kind is not None},
            },
        }

    def _take_leaf(self, path: Path, leaf: Any) -> Any:
        if isinstance(leaf, Mapping):
            return mapped(dict(leaf), self._take_leaf, is_leaf=is_special, path=path)
        name = ".".join(map(str, path))  # as weights are named: optimizer.state.0.exp_avg
        if not isinstance(leaf, Tensor):
            # The order of a set is not the same in every process.
            self.texts[name] = repr(sorted(map(repr, leaf)) if isinstance(leaf, set) else leaf)
            return leaf
        self.texts[name] = f"a {type(leaf).__name__}"
        if not _is_sharded(leaf):
            return _plain_tensor(leaf)
        while name in self.parts:  # {"a.b": …} and {"a": {"b": …}}
            name += "'"
        self.parts[name] = leaf
        return shards.mark(name)


def copied(tree: Any) -> Any:
    """Return a tree with tensors of its own, on the CPU; those that are one stay one."""
    known: dict[tuple[object, ...], Tensor] = {}
    gpus = set[torch.device]()

    def copy_of(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return deepcopy(leaf)
        if leaf.layout != torch.strided:
            return _on_cpu(leaf)
        place = leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.shape, leaf.stride()
        key = (*place, leaf.dtype, leaf.device)
        if key not in known:
            known[key] = _on_cpu(leaf)
            if leaf.is_cuda:
                gpus.add(leaf.device)
        return known[key]

    copies = mapped(tree, copy_of, is_leaf=is_special)
    # Each copy runs on the stream of now of the GPU that it comes from, whichever GPU is current.
    for gpu in gpus:
        torch.cuda.current_stream(gpu).synchronize()
    return copies


def load(thing: Any, tree: Any) -> None:
    """Give a thing its state, of whatever strategy. Collective if sharded."""
    if isinstance(thing, nn.Module):
        load_weights(thing, tree)
        return
    if isinstance(thing, torch.optim.Optimizer):
        tree = _sharded_like_parameters(thing, tree)
    thing.load_state_dict(tree)


def sharded_like(name: str, thing: object, paths: list[str]) -> dict[str, Tensor | None]:
    """Return, by path, tensors that are sharded as this rank has what is there in `thing`.

    Whatever their values are; None where this rank has it whole.
    """
    likes: dict[str, Any] = {}
    if isinstance(thing, nn.Module) and paths:
        likes = {f"{name}.{own}": value for own, value in unwrap(thing).state_dict().items()}
    elif isinstance(thing, torch.optim.Optimizer):
        # optimizer.state.<number of the parameter>.<what>
        prefixes = {f"{name}.state.{n}": like for n, like in enumerate(_parameters(thing))}
        likes = {path: prefixes.get(path.rpartition(".")[0]) for path in paths}
    found = {path: likes.get(path) for path in paths}
    return {path: like if _is_sharded(like) else None for path, like in found.items()}


def is_stateful(thing: object) -> bool:
    """Whether a thing has a state of its own; the others are values."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def strategy_of(thing: object) -> str | None:
    """Return the strategy of a model, or None for anything else."""
    return _replica.strategy_of(thing).name if isinstance(thing, nn.Module) else None


def state_dict_of(thing: Any) -> Any:
    """Return the state of a thing, of a model with its plain names."""
    is_model = isinstance(thing, nn.Module)
    return _replica.strategy_of(thing).state_dict(thing) if is_model else thing.state_dict()


def _on_cpu(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda or tensor.layout != torch.strided:
        return tensor.to("cpu", copy=True)
    # Into pinned memory, several times as fast; whoever asks for it waits for all at once.
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _plain_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor without history, and without the memory around it, which would be saved."""
    plain = tensor.detach()
    is_part = plain.layout == torch.strided and (
        plain.untyped_storage().nbytes() > plain.numel() * plain.element_size()
    )
    return plain.clone() if is_part else plain


def _is_sharded(value: object) -> bool:
    """Whether a value is a DTensor."""
    # By what it can do: importing its class costs half a second.
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    # In the order by which state_dict() numbers them.
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _sharded_like_parameters(optimizer: torch.optim.Optimizer, tree: Any) -> Any:
    """Shard the whole tensors in an optimizer's state whose parameters are sharded."""
    parameters = dict(enumerate(_parameters(optimizer)))
    state = {
        number: {key: _sharded_like(parameters.get(number), value) for key, value in own.items()}
        for number, own in tree["state"].items()
    }
    return {**tree, "state": state}


def _sharded_like(like: Any, value: Any) -> Any:
    whole = isinstance(value, Tensor) and not _is_sharded(value)
    if not _is_sharded(like) or not whole or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  # half a second

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
