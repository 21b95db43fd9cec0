"""What a checkpoint holds of the things that are saved: taken from them, and given back.

A state is a tree of dicts, lists and tuples, as ``state_dict()`` returns it, that
``torch.load(weights_only=True)`` can read. Sharded tensors are in a dict of their own, by their
path in the tree, where a mark stands for each.
"""

import copy
import io
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pardata.model import _strategy
from pardata.model._unwrap import unwrap
from pardata.model._weights import load_weights

Tree: TypeAlias = Any

_MARK = "pardata: a sharded tensor"
_LONG = 2**63


def state_of(name: str, thing: object) -> Tree:
    """Return the state of a thing with ``state_dict``, or a plain value as it is.

    Raises:
        TypeError: where it holds what no checkpoint may: names it.
    """
    tree = _state_dict(thing) if is_stateful(thing) else thing
    tree = _mapped(tree, lambda _, leaf: _plain_tensor(leaf) if _is_tensor(leaf) else leaf, name)
    _require_loadable(name, tree)
    return tree


def is_stateful(thing: object) -> bool:
    """Whether a thing has a state of its own; the others are values."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def leaves(tree: Tree) -> dict[str, str]:
    """Return what must be the same on every rank as text, by its path; of tensors only their kind.

    The same for the same in every process: the order of a set is not.
    """
    found: dict[str, str] = {}

    def take(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found[path] = f"a {type(leaf).__name__}"
        else:
            found[path] = repr(sorted(map(repr, leaf)) if isinstance(leaf, set) else leaf)
        return leaf

    _mapped(tree, take, "")
    return found


def copied(tree: Tree) -> Tree:
    """Return a tree with tensors of its own, on the CPU; those that are one stay one."""
    known: dict[tuple[object, ...], Tensor] = {}

    def copy_of(_: str, leaf: Any) -> Any:
        if not _is_tensor(leaf):
            return leaf if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
        if leaf.layout != torch.strided:
            return _on_cpu(leaf)
        place = leaf.untyped_storage().data_ptr(), leaf.storage_offset(), leaf.shape, leaf.stride()
        key = (*place, leaf.dtype, leaf.device)
        if key not in known:
            known[key] = _on_cpu(leaf)
        return known[key]

    copies = _mapped(tree, copy_of, "")
    if any(tensor.is_pinned() for tensor in known.values()):
        torch.cuda.synchronize()
    return copies


def split(tree: Tree) -> tuple[Tree, dict[str, Tensor]]:
    """Return the tree with marks for its sharded tensors, and those, by their paths."""
    sharded: dict[str, Tensor] = {}

    def take(path: str, leaf: Any) -> Any:
        if not is_distributed(leaf):
            return leaf
        while path in sharded:  # {"a.b": …} and {"a": {"b": …}}
            path += "'"
        sharded[path] = leaf
        return {_MARK: path}

    return _mapped(tree, take, ""), sharded


def marks(tree: Tree) -> list[str]:
    """Return the paths that `split` has marked."""
    found: list[str] = []
    _fill(tree, found.append)
    return found


def joined(tree: Tree, sharded: Mapping[str, Tensor]) -> Tree:
    """Return what `split` took apart."""
    return _fill(tree, sharded.__getitem__)


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
    return {path: _distributed_or_none(likes.get(path)) for path in paths}


def load(thing: Any, tree: Tree) -> None:
    """Give a thing the state that `state_of` took, of whatever strategy. Collective if sharded."""
    if isinstance(thing, nn.Module):
        load_weights(thing, tree)
        return
    if isinstance(thing, torch.optim.Optimizer):
        tree = _sharded_like_parameters(thing, tree)
    thing.load_state_dict(tree)


def is_distributed(value: object) -> bool:
    """Whether a value is a DTensor."""
    # By what it can do: importing its class costs half a second.
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def strategy_of(thing: object) -> str | None:
    """Return the strategy of a model, or None for anything else."""
    return _strategy.strategy_of(thing).name if isinstance(thing, nn.Module) else None


def _state_dict(thing: Any) -> Any:
    is_model = isinstance(thing, nn.Module)
    return _strategy.strategy_of(thing).state_dict(thing) if is_model else thing.state_dict()


def _mapped(tree: Tree, change: Callable[[str, Any], Any], path: str) -> Tree:
    """Return a tree with every leaf changed; `change` is told its path."""
    if isinstance(tree, Mapping):
        new = copy.copy(tree) if isinstance(tree, dict) else dict(tree)
        # A shallow copy has the type, and what else a state dict carries (`_metadata`).
        for key, value in tree.items():
            new[key] = _mapped(value, change, f"{path}.{key}" if path else str(key))
        return new
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        items = [_mapped(item, change, f"{path}.{index}") for index, item in enumerate(tree)]
        return type(tree)(items)
    return change(path, tree)


def _fill(tree: Tree, value: Callable[[str], Any]) -> Tree:
    """Return a tree with `value` of its path in place of every mark."""
    if isinstance(tree, Mapping):
        if set(tree) == {_MARK}:
            return value(tree[_MARK])
        new: Any = copy.copy(tree)
        for key, item in tree.items():
            new[key] = _fill(item, value)
        return new
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        return type(tree)([_fill(item, value) for item in tree])
    return tree


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and not is_distributed(leaf)


def _plain_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor without history, and without the memory around it, which would be saved."""
    plain = tensor.detach()
    is_part = plain.layout == torch.strided and (
        plain.untyped_storage().nbytes() > plain.numel() * plain.element_size()
    )
    return plain.clone() if is_part else plain


def _on_cpu(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda or tensor.layout != torch.strided:
        return tensor.to("cpu", copy=True)
    # Into pinned memory, several times as fast; whoever asks for it waits for all at once.
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _require_loadable(name: str, tree: Tree) -> None:
    """Raise for what could be written and not be read again."""
    if _is_plain(tree):
        return
    # Asking PyTorch itself, which knows what the user has allowed beside its own.
    # Of tensors only those of classes that need not be known to it.
    skeleton = _mapped(tree, lambda _, leaf: None if _is_known_to_load(leaf) else leaf, name)
    why = _refusal(skeleton)
    if why is None:
        return
    path, leaf = _culprit(name, skeleton)
    text = textwrap.shorten(repr(leaf), 100)
    msg = (
        f"what is saved must be tensors, numbers, strings, and dicts, lists and tuples of them, "
        f"but `{path}` is {text} ({type(leaf).__module__}.{type(leaf).__qualname__}): convert it, "
        f"or leave it out; it would have to run code when it is loaded"
    )
    raise TypeError(msg) from why


def _is_plain(tree: Tree) -> bool:
    """Whether a tree is, to the last leaf, of what any PyTorch loads: asking it takes longer."""
    kind = type(tree)
    if kind is dict:
        return all(map(_is_plain, tree)) and all(map(_is_plain, tree.values()))
    if kind is OrderedDict:  # of a state_dict(), with `_metadata` beside the items
        return _is_plain(dict(tree)) and _is_plain(vars(tree))
    if kind in (list, tuple):
        return all(map(_is_plain, tree))
    if kind is int:
        return bool(-_LONG <= tree < _LONG)
    return kind in (float, bool, str, type(None)) or _is_known_to_load(tree)


def _is_known_to_load(leaf: object) -> bool:
    return type(leaf) is Tensor or is_distributed(leaf)


def _culprit(path: str, tree: Tree) -> tuple[str, Any]:
    """Return what is not loadable in a tree that is not, and its path."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if _refusal(value) is not None:
                return _culprit(f"{path}[{key!r}]", value)
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            if _refusal(item) is not None:
                return _culprit(f"{path}[{index}]", item)
    return path, tree


def _refusal(tree: Tree) -> Exception | None:
    """Return why a tree cannot be written, or read again without running code, if so."""
    file = io.BytesIO()
    try:
        torch.save(tree, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # noqa: BLE001  # whatever the user's own pickling raises
        return error
    return None


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    # In the order by which state_dict() numbers them.
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _distributed_or_none(value: object) -> Tensor | None:
    return value if isinstance(value, Tensor) and is_distributed(value) else None


def _sharded_like_parameters(optimizer: torch.optim.Optimizer, tree: Tree) -> Tree:
    """Shard the whole tensors in an optimizer's state whose parameters are sharded."""
    parameters = dict(enumerate(_parameters(optimizer)))
    state = {
        number: {key: _sharded_like(parameters.get(number), value) for key, value in own.items()}
        for number, own in tree["state"].items()
    }
    return {**tree, "state": state}


def _sharded_like(parameter: Tensor | None, value: Any) -> Any:
    like: Any = _distributed_or_none(parameter)
    whole = isinstance(value, Tensor) and not is_distributed(value)
    if like is None or not whole or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  # half a second

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
