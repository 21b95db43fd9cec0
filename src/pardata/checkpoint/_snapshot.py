"""What is taken of a run at one moment: trees that can be read again without running code."""

import io
import textwrap
from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pardata.checkpoint import _shards as shards
from pardata.collective._tree import Path, in_brackets, is_special, leaves, mapped
from pardata.model._strategy import strategy_of
from pardata.ranks._version import __version__
from pardata.ranks._world import World

_LONG = 2**63
_LEAVES = {Tensor, nn.Parameter, int, float, str, bool, type(None)}  # most of all


@dataclass(eq=False)
class Snapshot:
    """What is taken of objects: the states of those that have one, the others as they are.

    Attributes:
        trees: by name, with marks for what is sharded.
        parts: sharded tensors, by their paths.
        facts: what the manifest says of the objects.
    """

    trees: Any = None
    parts: dict[str, Tensor] = field(default_factory=dict)
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
        self.trees = mapped(states, self._taken, is_leaf=_is_leaf)
        _require_safe(self.trees)
        if copy:
            # The others are freed here, before a thread writes: with each that was freed beside it,
            # the caller would give way to it, and it may hold the interpreter for 30 ms.
            self.trees = copied(self.trees)
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

    def texts(self) -> dict[str, str]:
        """Return what must be the same on every rank, by its path; of tensors only their kind."""
        found = {}
        for path, leaf in leaves(self.trees, is_leaf=_is_leaf):
            # The order of a set is not the same in every process.
            text = repr(sorted(map(repr, leaf)) if isinstance(leaf, set) else leaf)
            found[_name(path)] = f"a {type(leaf).__name__}" if isinstance(leaf, Tensor) else text
        return found

    def _taken(self, path: Path, leaf: Any) -> Any:
        """Return a leaf as it will be written: a mapping of its own kind as a plain dict."""
        if isinstance(leaf, Tensor):
            if not hasattr(leaf, "device_mesh"):  # no DTensor: importing that costs half a second
                return _plain_tensor(leaf)
            name = _name(path)
            while name in self.parts:  # {"a.b": …} and {"a": {"b": …}}
                name += "'"
            self.parts[name] = leaf
            return shards.mark(name)
        if isinstance(leaf, Mapping):
            return mapped(dict(leaf), self._taken, is_leaf=_is_leaf, path=path)
        return leaf


def _is_leaf(part: object) -> bool:
    """Whether not to look into a part: tells the leaves that are many at once, and the special."""
    return type(part) in _LEAVES or is_special(part)


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


def copied(tree: Any) -> Any:
    """Return a tree with tensors of its own, on the CPU; those that are one stay one."""
    known: dict[tuple[Any, ...], Tensor] = {}

    def copy_of(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf if type(leaf) in _LEAVES else deepcopy(leaf)
        if leaf.layout != torch.strided:
            return leaf.to("cpu", copy=True)
        form = leaf.shape, leaf.stride(), leaf.dtype, leaf.is_conj(), leaf.is_neg()
        key = (leaf.data_ptr(), *form, leaf.device)
        if key not in known:
            known[key] = _on_cpu(leaf)
        return known[key]

    copies = mapped(tree, copy_of, is_leaf=_is_leaf)
    # Each copy runs on the stream of now of the GPU that it comes from, whichever GPU is current.
    for gpu in {device for *_, device in known if device.type == "cuda"}:
        torch.cuda.current_stream(gpu).synchronize()
    return copies


def _on_cpu(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
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


def _require_safe(trees: Mapping[str, Any]) -> None:
    """Raise for what could be written and not be read again.

    Raises:
        TypeError: names the first leaf that could not, or the tree whose keys could not.
    """
    if _is_plain(trees):
        return
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
