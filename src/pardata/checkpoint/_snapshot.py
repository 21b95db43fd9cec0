"""The state of a run at one moment, as trees that load with ``weights_only=True``.

Does not copy state unless it is asked to: a synchronous save writes the tensors themselves.
"""

import io
import textwrap
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pardata import _pytree
from pardata._pytree import KeyPath, content_hash, is_custom_container, keystr, map_with_path
from pardata._validation import plain_number, type_with_article
from pardata.checkpoint._dcp import is_sharded
from pardata.environment._device import has_streams
from pardata.environment._logger import get_logger
from pardata.environment._world import World, __version__
from pardata.model._grads_and_buffers import has_unused_gradients
from pardata.model._replica_state import bits_of, replicated
from pardata.model._unwrap import unwrap
from pardata.strategies._wrap_model import strategy_of

_log = get_logger(__name__)

_Named: TypeAlias = Mapping[str, Any]
_UNUSED = "`%s` has unused gradients, which a checkpoint loses: save after the optimizer's step"


class Snapshot:
    """The states of objects, and the values of objects without a state.

    Attributes:
        trees: the state or value of each object by name, with `None` in place of sharded tensors.
        per_rank: the states and values of the `per_rank` objects.
        parts: sharded tensors by their path in `trees`.
        compared: texts that must be equal on all ranks, by path. Tensors of models, and sharded
            ones, are compared by dtype and shape only.
        parameters: the names of the parameters of each optimizer.
        facts: entries of the manifest.

    Args:
        world: this process.
        objects: by name.
        per_rank: objects that differ between ranks, by name.
        copy: whether to copy the state that this rank writes, because training continues during the
            write.

    Raises:
        TypeError: an object, which the error names, cannot be loaded without running code.
    """

    def __init__(self, world: World, objects: _Named, per_rank: _Named, *, copy: bool) -> None:
        self.parts: dict[KeyPath, Tensor] = {}
        self.compared: dict[str, str] = {}
        both = {**objects, **per_rank}
        values = [name for name, thing in both.items() if not _is_stateful(thing)]
        self._same = objects if world.size > 1 else {}
        self._weights = {(n, key) for n, m in _models(objects).items() for key in replicated(m)}
        self.parameters = parameter_names(objects)
        for name, names in self.parameters.items():
            self.compared |= {f"parameter {n} of {name}": str(one) for n, one in enumerate(names)}
        self.trees, copies = dict[str, Any](), HostCopies()
        for name, thing in both.items():
            if isinstance(thing, nn.Module):
                if has_unused_gradients(thing):
                    _log.warning(_UNUSED, name, ranks=[0], once=True)
                state: Any = strategy_of(thing).state_dict(thing)
            else:
                state = thing if name in values else thing.state_dict()
            make = copies.of if copy and (world.is_main or name in per_rank) else _plain_tensor
            with torch.no_grad():  # copies carry no autograd history
                self.trees[name] = self._collect(state, make, name)
            _require_safe((name,), self.trees[name])
        if copy:
            self.parts = {at: p.detach().to("cpu", copy=True) for at, p in self.parts.items()}
            self.trees = map_with_path(self.trees, _copied, is_leaf=is_custom_container)
        copies.wait()
        self.per_rank = {name: self.trees.pop(name) for name in per_rank}
        numbers = {n: objects[n] for n in values if type(objects.get(n)) in (int, float)}
        self.facts: dict[str, Any] = {"values": values, "per_rank": list(per_rank)}
        self.facts |= {"numbers": numbers, "processes": world.size}
        self.facts |= {"pardata": __version__, "torch": str(torch.__version__)}

    def _text(self, at: KeyPath, leaf: object) -> str:
        """Return the text of a leaf that the ranks compare."""
        if not isinstance(leaf, Tensor):
            # The order of a set differs between processes.
            return repr(sorted(map(repr, leaf)) if isinstance(leaf, set) else leaf)
        text = f"a {type(leaf).__name__} of {leaf.dtype}, shape {tuple(leaf.shape)}"
        thing = self._same[at[0]]
        is_plain = type(leaf) in (Tensor, nn.Parameter)  # not sharded, nor quantized
        if not is_plain or (isinstance(thing, nn.Module) and at not in self._weights):
            return text  # a rank may have buffers that differ
        is_large = isinstance(thing, nn.Module | torch.optim.Optimizer)
        digest = bits_of if is_large else content_hash  # SHA-256 takes longer, or a copy from a GPU
        return f"{text}, bits {digest(leaf)}"

    def _collect(self, tree: Any, make: Callable[[Tensor], Tensor], name: str) -> Any:
        """Return a copy of a tree for the file, and note its sharded tensors and texts.

        Args:
            tree: is not changed.
            make: returns the tensor to write in place of a tensor.
            name: the name of the object.
        """

        def take(at: KeyPath, leaf: Any) -> Any:
            _pytree.require_dense(leaf, at[0], at[1:])
            if name in self._same:
                self.compared[".".join(map(str, at))] = self._text(at, leaf)
            if not isinstance(leaf, Tensor):
                return plain_number(leaf)
            if not is_sharded(leaf):
                return make(leaf)
            self.parts[at] = leaf
            return None

        return map_with_path(tree, take, is_leaf=is_custom_container, path=(name,))


def parameter_names(objects: _Named) -> dict[str, list[str | None]]:
    """Return, for each optimizer, the names of its parameters in the models among `objects`.

    They are in the order in which the optimizer's state numbers them; None for one of no model.
    """
    models = _models(objects).items()
    names = {p: f"{of}.{n}" for of, m in models for n, p in unwrap(m).named_parameters()}
    optimizers = {n: one for n, one in objects.items() if isinstance(one, torch.optim.Optimizer)}
    return {n: [names.get(p) for p in numbered_parameters(one)] for n, one in optimizers.items()}


def numbered_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of an optimizer in the order in which its state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _models(objects: _Named) -> dict[str, nn.Module]:
    return {name: one for name, one in objects.items() if isinstance(one, nn.Module)}


def check_stateful(objects: Mapping[str, object]) -> None:
    """Raise a `TypeError` for an object without a state to restore."""
    for name, thing in objects.items():
        if not _is_stateful(thing):
            msg = f"`restore` must be given what has state_dict and load_state_dict, but `{name}` "
            msg += f"is {type_with_article(thing)}: values are in what it returns, `at` is the step"
            raise TypeError(msg)


def _is_stateful(thing: object) -> bool:
    """Whether an object has a state; all others are values."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


class HostCopies:
    """Copies tensors to the CPU; equal views of one memory share one copy."""

    def __init__(self) -> None:
        self._copies: dict[Any, tuple[Tensor, Tensor]] = {}
        self._gpus: set[torch.device] = set()

    def of(self, tensor: Tensor) -> Tensor:
        """Return a copy; a copy from a GPU is complete after `wait`."""
        if tensor.layout != torch.strided:
            return tensor.to("cpu", copy=True)
        view = tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
        key = (tensor.data_ptr(), *view, tensor.dtype, tensor.device)
        if key not in self._copies:
            if has_streams(tensor.device):  # a copy to pinned memory is several times as fast
                self._gpus.add(tensor.device)
                copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
                copy.copy_(tensor, non_blocking=True)
            else:
                copy = tensor.clone() if tensor.is_cpu else tensor.cpu()
            self._copies[key] = tensor, copy  # held, so that its memory is not reused
        return self._copies[key][1]

    def wait(self) -> None:
        """Wait until all copies are complete."""
        # Each copy runs on the current stream of its GPU, which need not be the current device.
        for gpu in self._gpus:
            torch.get_device_module(gpu).current_stream(gpu).synchronize()


def _plain_tensor(tensor: Tensor) -> Tensor:
    """Return a detached tensor, cloned if it views larger memory, all of which would be saved."""
    plain = tensor.detach()
    is_part = plain.layout == torch.strided and plain.untyped_storage().nbytes() > plain.nbytes
    return plain.clone() if is_part else plain


def _copied(_: KeyPath, leaf: Any) -> Any:
    return leaf if isinstance(leaf, Tensor) else deepcopy(leaf)


def _require_safe(path: KeyPath, part: Any) -> None:
    """Raise a `TypeError` if `part` could be loaded only by running code.

    Raises:
        TypeError: the error names the innermost such part.
    """
    # PyTorch decides, because the user may have allowed more classes (`add_safe_globals`). Plain
    # tensors are left out: they always load.
    without = map_with_path(
        part, lambda _, x: None if type(x) is Tensor else x, is_leaf=is_custom_container
    )
    file = io.BytesIO()
    try:
        torch.save(without, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:  # pickling of the user's classes may raise anything
        inner = without.items() if isinstance(without, dict) else ()
        for key, each in enumerate(without) if type(without) in (list, tuple) else inner:
            _require_safe((*path, key), each)  # raises if this item is the cause
        text = textwrap.shorten(repr(part), 100)
        msg = "what is saved must be tensors, numbers, strings, dicts, lists and tuples, but"
        msg += f" `{keystr(path[0], path[1:])}` is {text} ({type(part).__qualname__}): convert it"
        raise TypeError(msg) from error
