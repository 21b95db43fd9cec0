"""Weights in and out of a model, whatever wraps it, and whether all ranks hold the same."""

import ctypes
import hashlib
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from pardata.collective._agreement import agree, require_same
from pardata.model._unwrap import Wrapper, is_sharded, layers, unwrap
from pardata.model._weight_file import read_weights
from pardata.ranks._world import require_world

# What wrappers put into the names of parameters.
_PREFIXES = ("module", "_orig_mod")

NO_ASSIGN = "`assign` must be False for a wrapped model: assign to the module before wrapping it"


class LoadedKeys(NamedTuple):
    """What ``nn.Module.load_state_dict`` returns: the names that found no partner."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(
    model: nn.Module,
    state_or_path: Mapping[str, Any] | str | os.PathLike[str],
    *,
    strict: bool = True,
    assign: bool = False,
) -> LoadedKeys:
    """Load weights into `model`, from plain, ``module.`` or ``_orig_mod.`` names alike.

    Works for every strategy, and for a module that is not wrapped. Every rank loads the same
    complete weights; collective under ``"fsdp"`` only.

    Args:
        model: what `wrap_model` returned, or any module.
        state_or_path: a state dict, or a file that holds one: safetensors by its name, else what
            ``torch.save`` wrote, read on the CPU with ``weights_only=True``.
        strict: raise where names are missing or unexpected.
        assign: as in ``nn.Module.load_state_dict``; refused for a wrapped model, whose
            parameters must stay the objects that the wrapper and the optimizer know.

    Raises:
        TypeError: where there is no mapping of names to tensors, or no module.
        ValueError: where two names stand for one parameter, or `assign` for a wrapped model.
        RuntimeError: as ``nn.Module.load_state_dict``, for names and shapes that do not match.
            Under ``"fsdp"`` all are raised on every rank.

    >>> import torch
    >>> net = nn.Linear(1, 1)
    >>> load_weights(net, {"module.weight": torch.ones(1, 1), "module.bias": torch.zeros(1)})
    LoadedKeys(missing_keys=[], unexpected_keys=[])
    """
    plain = unwrap(model)
    if is_sharded(plain):
        return _load_sharded(plain, state_or_path, strict=strict, assign=assign)
    if assign and plain is not model:
        raise ValueError(NO_ASSIGN)
    state = _read_state(state_or_path)
    for layer in layers(model):
        if isinstance(layer, Wrapper):
            layer.check_state(state)
    state = _renamed(state, plain)
    return LoadedKeys(*plain.load_state_dict(state, strict=strict, assign=assign))


def fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 of the names, dtypes and bits of all parameters and buffers.

    Takes them in the order of ``unwrap(model).state_dict()``, so equal weights give equal values
    under every strategy and world size. Collective under ``"fsdp"``, where each rank has a part;
    otherwise of this rank's own weights, and the same in a single process.

    >>> fingerprint(nn.Identity())[:8]
    'e3b0c442'
    """
    digest = hashlib.sha256()
    for name, tensor in named_tensors(model):
        digest.update(f"{name} {tensor.dtype}".encode())
        _update(digest, tensor)
    return digest.hexdigest()


def check_in_sync(model: nn.Module) -> None:
    """Raise on every rank if parameters or buffers differ between ranks. Collective.

    Compares bits, so NaN equals NaN and 0.0 is not -0.0. Under ``"fsdp"`` sharded parameters have
    no second copy to differ from; what every rank holds whole is compared. In a single process
    there is nothing to differ.

    Raises:
        TypeError: for what is no module, on every rank.
        RuntimeError: names the first parameter that differs, how many do, and the ranks.

    >>> check_in_sync(nn.Linear(2, 2))
    """
    here = require_world("check_in_sync")
    digests: dict[str, str] = {}

    def combined() -> dict[str, object]:
        plain = unwrap(model)
        if here.size > 1:
            whole = [(name, t) for name, t in plain.state_dict().items() if _is_whole(t)]
            digests.update((name, _digest(tensor)) for name, tensor in whole)
        return {"all": _combined(digests)}

    told = agree(here, "check_in_sync", combined)
    if len({str(facts["all"]) for facts in told}) == 1:
        return
    told = agree(here, "check_in_sync (in detail)", lambda: digests)
    require_same(
        "check_in_sync",
        [{"the parameter names": sorted(facts)} for facts in told],
        "Build the same model on every rank.",
    )
    differing = [name for name in digests if len({facts[name] for facts in told}) > 1]
    first = differing[0]
    groups: dict[object, list[int]] = {}
    for rank, facts in enumerate(told):
        groups.setdefault(facts[first], []).append(rank)
    holders = " | ".join(", ".join(map(str, ranks)) for ranks in groups.values())
    msg = (
        f"every rank must hold the same weights, but `{first}` differs between ranks "
        f"{holders} ({len(differing)} of {len(digests)} parameters and buffers differ): was it "
        f"changed on some ranks only, or trained without the wrapped model's forward?"
    )
    raise RuntimeError(msg)


def _read_state(state: object) -> Mapping[str, Any]:
    if isinstance(state, str | os.PathLike):
        state = read_weights(state)
    if not isinstance(state, Mapping):
        msg = f"`state_or_path` must be a state dict or a path, but is a {type(state).__name__}"
        raise TypeError(msg)
    odd = [key for key in state if not isinstance(key, str)]
    if odd:
        msg = (
            f"`state_or_path` must map names to tensors, but has the key {odd[0]!r} "
            f"({type(odd[0]).__name__}): pass what a model's state_dict() returned"
        )
        raise TypeError(msg)
    nested = [
        key
        for key, value in state.items()
        # What a module's get_extra_state() returns may well be a dict.
        if isinstance(value, Mapping) and not str(key).endswith("_extra_state")
    ]
    if nested:
        msg = (
            f"`state_or_path` must map names to tensors, but {nested[0]!r} holds a dict: if this "
            f"is a checkpoint of several things, pass the model's part, as "
            f"checkpoint[{nested[0]!r}]"
        )
        raise TypeError(msg)
    return state


def _renamed(state: Mapping[str, Any], plain: nn.Module) -> dict[str, Any]:
    """Give the entries of `state` the names that `plain` uses."""
    known = plain.state_dict().keys()
    renamed: OrderedDict[str, Any] = OrderedDict()
    _keep_versions(state, renamed, plain)
    by_core: dict[str, list[str]] = {}
    for name in known:
        by_core.setdefault(_core(name), []).append(name)
    for name, value in state.items():
        partner = _partner(name, by_core.get(_core(name), []))
        if partner in renamed:
            msg = f"`state_or_path` must name each parameter once, but {partner!r} comes twice"
            raise ValueError(msg)
        renamed[partner] = value
    return renamed


def _keep_versions(
    state: Mapping[str, Any], renamed: OrderedDict[str, Any], plain: nn.Module
) -> None:
    """Pass on which version of each module wrote `state`: what may be missing goes by that."""
    versions = {_core(path): facts for path, facts in getattr(state, "_metadata", {}).items()}
    paths = [path for path, _ in plain.named_modules() if _core(path) in versions]
    if paths:
        metadata = OrderedDict((path, versions[_core(path)]) for path in paths)
        renamed._metadata = metadata  # type: ignore[attr-defined]  # noqa: SLF001  # PyTorch's place for it


def _partner(name: str, partners: list[str]) -> str:
    """Return which of the names with the same core `name` stands for; `name` itself if none."""
    if len(partners) == 1:
        return partners[0]
    # Several, where children are really called "module": the longest that wrappers can have
    # taken in, which is `name` itself where that is one of them.
    return max((own for own in partners if _is_within(own, name)), key=len, default=name)


def _is_within(short: str, long: str) -> bool:
    parts = iter(long.split("."))
    return all(part in parts for part in short.split("."))


def _core(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _PREFIXES)


def _load_sharded(
    plain: nn.Module, state_or_path: object, *, strict: bool, assign: bool
) -> LoadedKeys:
    # Costs half a second, which whoever has a sharded model has paid already.
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415
        StateDictOptions,
        set_model_state_dict,
    )

    found: list[tuple[dict[str, Any], LoadedKeys]] = []

    def check() -> dict[str, object]:
        if assign:
            raise ValueError(NO_ASSIGN)
        state = _renamed(_read_state(state_or_path), plain)
        found.append((state, _keys_of(plain, state, strict=strict)))
        return {}

    # The ranks load together, so none begins where another cannot.
    agree(require_world("load_weights"), "load_weights", check)
    ((state, keys),) = found
    whole = not any(hasattr(value, "full_tensor") for value in state.values())
    options = StateDictOptions(full_state_dict=whole, strict=False)
    set_model_state_dict(plain, state, options=options)
    return keys


def _keys_of(plain: nn.Module, state: dict[str, Any], *, strict: bool) -> LoadedKeys:
    # PyTorch passes over names that are missing, strict or not: look here.
    names = plain.state_dict().keys()
    keys = LoadedKeys(
        [name for name in names if name not in state], [name for name in state if name not in names]
    )
    if strict and (keys.missing_keys or keys.unexpected_keys):
        msg = (
            f"the weights must have the names of {type(plain).__name__}, but missing are "
            f"{keys.missing_keys} and unexpected {keys.unexpected_keys}: pass the weights of this "
            f"model, or strict=False"
        )
        raise RuntimeError(msg)
    return keys


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers, whole and by name; collective where they are sharded."""
    for name, value in unwrap(model).state_dict().items():
        if isinstance(value, Tensor):  # not what get_extra_state() returns
            yield name, value if _is_whole(value) else value.full_tensor()  # type: ignore[attr-defined]


def _is_whole(value: object) -> bool:
    """Whether a value of a state dict is a tensor of which this rank has all."""
    return isinstance(value, Tensor) and not hasattr(value, "full_tensor")


def _digest(tensor: Tensor) -> str:
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    _update(digest, tensor)
    return digest.hexdigest()


def _combined(digests: Mapping[str, str]) -> str:
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def _update(digest: "hashlib._Hash", tensor: Tensor) -> None:
    data = tensor.detach().cpu().contiguous()
    # The bytes as they lie in memory, without NumPy, which torch does not require.
    digest.update(
        (ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b""
    )
