"""The module inside its wrappers."""

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DataParallel, DistributedDataParallel and ``torch.compile``.

    Peels any nesting of them. A module that is not wrapped, or that ``fully_shard`` changed in
    place (strategy ``"fsdp"``), comes back as it is. Not collective.

    >>> import torch
    >>> net = torch.nn.Linear(2, 2)
    >>> unwrap(torch.nn.DataParallel(net)) is net
    True
    """
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def is_parallel(model: nn.Module, *, but_for_sharded_parts: bool = False) -> bool:
    """Whether `model` is, or holds at any depth, a module that a strategy has wrapped."""
    whole = unwrap(model)
    return any(
        isinstance(module, DataParallel | DistributedDataParallel)
        or (is_sharded(module) and (module is whole or not but_for_sharded_parts))
        for module in model.modules()
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` or FSDP's older wrapper has taken this very module."""
    # By name: importing torch.distributed.fsdp costs half a second, and whoever has a sharded
    # module has paid it already.
    names = {cls.__name__ for cls in type(module).__mro__}
    return not names.isdisjoint({"FSDPModule", "FullyShardedDataParallel"})


def _inside(model: nn.Module) -> nn.Module | None:
    if isinstance(model, DataParallel | DistributedDataParallel):
        inside: nn.Module = model.module
        return inside
    # torch.compile's OptimizedModule; importing its class would import all of dynamo.
    if type(model).__name__ == "OptimizedModule":
        inner = model._modules.get("_orig_mod")  # noqa: SLF001  # what torch.compile has made of it
        return inner if isinstance(inner, nn.Module) else None
    return None
