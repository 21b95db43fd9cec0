"""What is taken of a run at one moment: trees that can be read again without running code."""

import io
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pardata.checkpoint import _shards as shards
from pardata.collective._tree import Path, in_brackets, is_special, leaves, mapped
from pardata.model._strategy import strategy_of
from pardata.ranks._version import __version__
from pardata.ranks._world import World

_LONG = 2**63
_CONSTANTS = {Tensor, int, float, str, bool, type(None)}  # and tensors, which are copied before


@dataclass(eq=False)
class Snapshot:
    """What is taken of objects: the states of those that have one, the others as they are.

    Attributes:
        trees: by name, with marks for what is sharded.
        parts: sharded tensors, by their paths.
        texts: what must be the same on every rank, by its path; of tensors only their kind.
        facts: what the manifest says of the objects.
    """

    trees: Any = None
    parts: dict[str, Tensor] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def take(self, here: World, objects: Mapping[str, Any], *, copy: bool) -> None:
        """Take what there is now, in memory of its own if it is to be a copy.

        Raises:
            TypeError: where an object holds what no checkpoint may: names it.
        """
        strategies = {n: strategy_of(o) for n, o in objects.items() if isinstance(o, nn.Module)}
        values = [name for name, thing in objects.items() if not _is_stateful(thing)]
        states = dict(objects)
        for name in [name for name in objects if name not in values]:
            thing, under = objects[name], strategies.get(name)
            states[name] = under.state_dict(thing) if under else thing.state_dict()
        copies = Copies() if copy else None
        with torch.no_grad():  # a copy has no history
            make = copies.of if copies else _plain_tensor
            taken = partial(self._taken, make, told=here.size > 1)
            self.trees = mapped(states, taken, is_leaf=is_special)
        if not _is_plain(self.trees):
            _require_safe(self.trees)
            if copy:
                self.trees = mapped(self.trees, _own_unless_copied, is_leaf=is_special)
        if copies:
            copies.wait()
        self.facts = {
            "values": values,
            "numbers": {n: states[n] for n in values if type(states[n]) in (int, float)},
            "identity": {
                "pardata": __version__,
                "torch": str(torch.__version__),
                "processes": here.size,
                "threads": torch.get_num_threads(),
                "strategies": {name: under.name for name, under in strategies.items()},
            },
        }

    def _taken(self, make: Callable[[Tensor], Tensor], path: Path, leaf: Any, *, told: bool) -> Any:
        """Return a leaf as it will be written: a mapping of its own kind as a plain dict.

        Args:
            make: returns what will be written of a tensor.
            path: of the leaf.
            leaf: to be taken.
            told: whether other ranks must have the same.
        """
        is_tensor = isinstance(leaf, Tensor)
        if not is_tensor and isinstance(leaf, Mapping):
            taken = partial(self._taken, make, told=told)
            return mapped(dict(leaf), taken, is_leaf=is_special, path=path)
        if told:
            self.texts[_name(path)] = _text_of(leaf)
        if not is_tensor:
            return leaf
        # By what a DTensor can do: importing its class costs half a second.
        if type(leaf) is Tensor or not hasattr(leaf, "device_mesh"):
            return make(leaf)
        name = _name(path)
        while name in self.parts:  # {"a.b": …} and {"a": {"b": …}}
            name += "'"
        self.parts[name] = leaf
        return shards.mark(name)


def _text_of(leaf: object) -> str:
    if isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    # The order of a set is not the same in every process.
    return repr(sorted(map(repr, leaf)) if isinstance(leaf, set) else leaf)


def _name(path: Path) -> str:
    """Return a path as weights are named: optimizer.state.0.exp_avg."""
    return ".".join(map(str, path))


def check_stateful(objects: Mapping[str, object]) -> None:
    """Raise for what has no state to be restored."""
    for name, thing in objects.items():
        if not _is_stateful(thing):
            raise TypeError(
                f"`restore` must be given what has state_dict and load_state_dict, but `{name}` "
                f"is a {type(thing).__name__}: values are in what it returns"
            )


def _is_stateful(thing: object) -> bool:
    """Whether a thing has a state of its own; the others are values."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


class Copies:
    """Makes copies of tensors, on the CPU: one of those that are one."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._gpus: set[torch.device] = set()

    def of(self, tensor: Tensor) -> Tensor:
        """Return a copy, for which `wait` waits."""
        if tensor.layout != torch.strided:
            return tensor.to("cpu", copy=True)
        alike = self._known.setdefault(tensor.data_ptr(), [])
        for other, copy in alike:
            if _form(other) == _form(tensor):
                return copy
        if tensor.is_cuda:  # into pinned memory, several times as fast
            self._gpus.add(tensor.device)
            copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
        else:
            copy = tensor.clone() if tensor.is_cpu else tensor.cpu()
        alike.append((tensor, copy))
        return copy

    def wait(self) -> None:
        """Wait until all copies are there."""
        # Each runs on the stream of now of the GPU that it comes from, whichever GPU is current.
        for gpu in self._gpus:
            torch.cuda.current_stream(gpu).synchronize()


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Return what tells tensors apart that begin at the same place."""
    view = tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return (*view, tensor.dtype, tensor.device)


def copied(tree: Any) -> Any:
    """Return a tree with tensors of its own, on the CPU; those that are one stay one."""
    copies = Copies()

    def copy_of(path: Path, leaf: Any) -> Any:
        return copies.of(leaf) if isinstance(leaf, Tensor) else _own_unless_copied(path, leaf)

    found = mapped(tree, copy_of, is_leaf=is_special)
    copies.wait()
    return found


def _own_unless_copied(_: Path, leaf: Any) -> Any:
    """Return a copy of a leaf that may change, but for a tensor."""
    return leaf if type(leaf) in _CONSTANTS else deepcopy(leaf)


def _plain_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor without history, and without the memory around it, which would be saved."""
    plain = tensor.detach()
    is_part = plain.layout == torch.strided and (
        plain.untyped_storage().nbytes() > plain.numel() * plain.element_size()
    )
    return plain.clone() if is_part else plain


def _require_safe(trees: Mapping[str, Any]) -> None:
    """Raise for what could be written and not be read again.

    Raises:
        TypeError: names the first leaf that could not, or the tree whose keys could not.
    """
    # Asking PyTorch itself, which knows what the user has allowed beside its own.
    # Of tensors only those of classes that need not be known to it.
    skeleton = mapped(trees, lambda _, x: None if type(x) is Tensor else x, is_leaf=is_special)
    why = _refusal(skeleton)
    if why is None:
        return
    parts = [*leaves(skeleton, is_leaf=is_special)]
    parts += [((name,), tree) for name, tree in skeleton.items()]
    (name, *path), part = next(item for item in parts if _refusal(item[1]) is not None)
    text = textwrap.shorten(repr(part), 100)
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    raise TypeError(
        f"what is saved must be tensors, numbers, strings, and dicts, lists and tuples of them, "
        f"but `{in_brackets(name, tuple(path))}` is {text} ({kind}): convert it, or leave it out; "
        f"it would have to run code when it is loaded"
    ) from why


def _is_plain(tree: Any) -> bool:
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
    return kind in (float, bool, str, type(None), Tensor)


def _refusal(tree: Any) -> Exception | None:
    """Return why a tree cannot be written, or read again without running code, if so."""
    file = io.BytesIO()
    try:
        torch.save(tree, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # noqa: BLE001  # whatever the user's own pickling raises
        return error
    return None
