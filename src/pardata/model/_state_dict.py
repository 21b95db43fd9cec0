"""Reads state dicts from files, maps their names to those of a module, shards and loads them."""

import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pardata._validation import type_with_article
from pardata.environment._world import require_world, store_client
from pardata.model._torch_internals import set_versions, versions_of
from pardata.model._unwrap import ShardedModule, Versioned, wrapper_chain
from pardata.store._round import exchange

# Parts of names that wrappers add.
_PREFIXES = ("module", "_orig_mod")

NO_ASSIGN = "`assign` must be False for a wrapped model: assign to the module before wrapping it"


class LoadedKeys(NamedTuple):
    """The result of `load_weights`: names that only the model, or only the weights, have."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_full(model: nn.Module, given: object, *, strict: bool, assign: bool) -> LoadedKeys:
    """Load a full state dict, or a file of one, into the module inside `model`."""
    *wrapped, plain = wrapper_chain(model)
    if assign and (wrapped or isinstance(plain, ShardedModule)):
        raise ValueError(NO_ASSIGN)
    state = _read_state(given)
    for layer in wrapped:
        if isinstance(layer, Versioned):
            for facts in versions_of(state).values():
                layer.check_versions(facts)
    return LoadedKeys(*plain.load_state_dict(_renamed(state, plain), strict=strict, assign=assign))


def load_sharded(model: nn.Module, given: object, *, strict: bool, assign: bool) -> LoadedKeys:
    """Load as `load_full`; an error on any rank is raised on all. Collective."""
    found: list[LoadedKeys] = []
    load = partial(load_full, model, given, strict=strict, assign=assign)
    require_world("load_weights")
    exchange(store_client(), "load_weights", lambda: found.append(load()))
    return found[0]


def shard_like(value: Any, template: Any) -> Any:
    """Return a tensor sharded like the DTensor `template`, if both have the same shape.

    Each rank takes its shard of its own `value`, which is the same on every rank.
    """
    fits = isinstance(value, Tensor) and value.shape == getattr(template, "shape", None)
    if not fits or not hasattr(template, "device_mesh") or hasattr(value, "device_mesh"):
        return value  # load_state_dict() raises if it does not fit
    # Already imported if the model is sharded.
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  # takes 0.5 s

    full = value.detach().to(template.device)
    return distribute_tensor(full, template.device_mesh, template.placements, src_data_rank=None)


def _read_state(state: object) -> Mapping[str, Any]:
    if isinstance(state, str | os.PathLike):
        state = read_weights(state)
    if not isinstance(state, Mapping):
        msg = f"`state_or_path` must be a state dict or a path, but is {type_with_article(state)}"
        raise TypeError(msg)
    for key, value in state.items():
        # A module's get_extra_state() may return a dict.
        if isinstance(value, Mapping) and not str(key).endswith("_extra_state"):
            msg = f"`state_or_path` must hold tensors, but {key!r} is a dict: pass state[{key!r}]"
            raise TypeError(msg)
    return state


def _renamed(state: Mapping[str, Any], plain: nn.Module) -> dict[str, Any]:
    """Return `state` with the names of `plain`, and with tensors sharded as there."""
    renamed: OrderedDict[str, Any] = OrderedDict()
    # Modules use the versions in the metadata to decide which keys may be missing.
    versions = {_strip_wrappers(path): facts for path, facts in versions_of(state).items()}
    paths = [path for path, _ in plain.named_modules()]
    set_versions(renamed, {path: versions.get(_strip_wrappers(path), {}) for path in paths})
    target = plain.state_dict()
    cores = Counter(map(_strip_wrappers, target))
    partners = {_strip_wrappers(name): name for name in target if cores[_strip_wrappers(name)] == 1}
    for name, value in state.items():
        partner = name if name in target else partners.get(_strip_wrappers(name), name)
        if partner in renamed:
            msg = f"`state_or_path` must name each parameter once, but {partner!r} comes twice"
            raise ValueError(msg)
        renamed[partner] = shard_like(value, target.get(partner))
    return renamed


def _strip_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _PREFIXES)


def read_weights(path: str | os.PathLike[str]) -> Any:
    """Return the contents of a file of weights, on the CPU, without running code.

    Raises:
        OSError: the file cannot be opened.
        RuntimeError: the file holds something else, or is damaged.
    """
    try:
        if os.fspath(path).endswith(".safetensors"):
            from safetensors.torch import load_file  # noqa: PLC0415  # pardata does not require it

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ImportError):
        raise
    except Exception as error:
        # torch and safetensors raise many types for a damaged file, and name no file. Only the
        # first sentence of torch's text: the next ones explain how to run the code in the file.
        sentence = str(error).partition("\n")[0].partition(". ")[0]
        msg = f"{os.fspath(path)} must be a file of weights, but cannot be read as one "
        msg += f"({type(error).__name__}: {sentence}): is it complete, with nothing but tensors?"
        raise RuntimeError(msg) from error
