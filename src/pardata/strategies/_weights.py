"""Load weights into a wrapped model, hash them, and compare them between ranks."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from pardata._pytree import require_dense, sha256_of
from pardata.collectives._comm_errors import explain_comm_errors
from pardata.environment._world import require_world, store_client
from pardata.model._state_dict import LoadedKeys
from pardata.model._unwrap import unwrap
from pardata.store._rank_errors import format_rank_table
from pardata.store._round import raise_if_different, require_equal
from pardata.strategies._wrap_model import strategy_of


def load_weights(
    model: nn.Module,
    state_or_path: Mapping[str, Any] | str | os.PathLike[str],
    *,
    strict: bool = True,
    assign: bool = False,
) -> LoadedKeys:
    """Load weights into `model`, from plain, ``module.`` or ``_orig_mod.`` names alike.

    It works for every strategy, and for a module that is not wrapped. Every rank loads the same
    complete weights. Collective if parameters are sharded.

    Args:
        model: what `wrap_model` returned, or any module.
        state_or_path: a state dict, or a file that holds one. The file is safetensors by its name,
            or else what ``torch.save`` wrote, read on the CPU with ``weights_only=True``.
        strict: raise an error if names are missing or unexpected.
        assign: as in ``nn.Module.load_state_dict``. A wrapped model refuses it, because the wrapper
            and the optimizer know its parameters.

    Raises:
        TypeError: `state_or_path` gives no mapping of names to tensors, or `model` is no module.
        ValueError: two names stand for one parameter, or `assign` is true for a wrapped model.
        RuntimeError: names or shapes do not match, as in ``nn.Module.load_state_dict``. Under
            ``"fsdp"`` all errors come on every rank.

    >>> import torch
    >>> net = nn.Linear(1, 1)
    >>> load_weights(net, {"module.weight": torch.ones(1, 1), "module.bias": torch.zeros(1)})
    LoadedKeys(missing_keys=[], unexpected_keys=[])
    """
    return strategy_of(model).load(model, state_or_path, strict=strict, assign=assign)


def fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 of the names, dtypes and bits of what is in ``state_dict()``.

    That is all parameters and buffers, except buffers that are registered with
    ``persistent=False``. It takes them in the order of ``unwrap(model).state_dict()``, so equal
    weights give equal values under every strategy and world size. Collective under ``"fsdp"``,
    because each rank has a part. Otherwise it is that of this rank's own weights, and the same in a
    single process.

    >>> fingerprint(nn.Identity())[:8]
    'e3b0c442'
    """
    state = unwrap(model).state_dict()
    with explain_comm_errors("fingerprint"):
        require_dense(state, "state_dict()")
        return sha256_of((f"{name} {full.dtype}", full) for name, full in named_tensors(model))


def check_in_sync(model: nn.Module) -> None:
    """Raise on every rank if parameters or buffers differ between ranks. Collective.

    It compares bits, so NaN equals NaN and 0.0 is not -0.0, and also buffers that are registered
    with ``persistent=False``. Under ``"fsdp"`` it compares replicated tensors, and the shards that
    a mesh of two dimensions puts on several ranks. Other shards have no second copy to differ from.
    In a single process there is nothing to compare.

    Raises:
        TypeError: `model` is no module; on every rank.
        RuntimeError: a parameter or buffer differs. The error names the first one, how many differ,
            and the ranks.

    >>> check_in_sync(nn.Linear(2, 2))
    """
    world = require_world("check_in_sync")

    def digests() -> Mapping[str, tuple[str, str]]:
        module = unwrap(model)
        # Includes non-persistent buffers.
        state = {**module.state_dict(), **dict(module.named_buffers())}
        require_dense(state, "state_dict()")
        return {
            name: (part, sha256_of([(f"{tensor.dtype} {tuple(tensor.shape)}", tensor)])[:16])
            for name, value in (state.items() if world.size > 1 else ())
            for part, tensor in _copies(value)
        }

    require_equal(store_client(), "check_in_sync", digests, _compare)


def _compare(found: list[dict[str, Any]]) -> None:
    """Raise with a table of the first weight that differs, if any does."""
    names: list[dict[str, object]] = [{"the parameter names": sorted(facts)} for facts in found]
    raise_if_different("check_in_sync", names, "Build the same model on every rank.")
    digests = {name: [tuple(facts[name]) for facts in found] for name in found[0]}
    # Only equal shards of a weight can be compared.
    differing = [n for n, all_ in digests.items() if len({*all_}) > len({part for part, _ in all_})]
    if not differing:
        return
    rows = [f"{part}SHA-256 {digest}…" for part, digest in digests[differing[0]]]
    raise RuntimeError(
        f"every rank must hold the same weights, but `{differing[0]}` differs between ranks "
        f"({len(differing)} of {len(found[0])} parameters and buffers differ):\n"
        f"{format_rank_table(rows)}\nWas it changed on some ranks, or trained without the wrapper?"
    )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name, unsharded. Collective if they are sharded."""
    for name, value in unwrap(model).state_dict().items():
        if isinstance(value, Tensor):  # not an extra state
            yield name, value.full_tensor() if hasattr(value, "full_tensor") else value


def _copies(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's copy of a value, and its shard's name, if other ranks have a copy too."""
    if hasattr(value, "full_tensor"):
        places = zip(value.device_mesh.get_coordinate(), value.placements, strict=True)
        part = [at for at, placement in places if not placement.is_replicate()]
        if len(part) < value.device_mesh.ndim:
            yield f"shard {part}, ", value.to_local()
    elif isinstance(value, Tensor):
        yield "", value
