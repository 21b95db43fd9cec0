"""The module inside its wrappers."""

from abc import ABC
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pardata._validation import check_module


class Wrapper(nn.Module):
    """A wrapper of pardata's own, which is none of PyTorch's classes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def check_versions(self, facts: Mapping[str, Any]) -> None:
        """Refuse weights by what their state says of the version of one module."""


class ShardedModule(ABC):  # noqa: B024  # its subclasses are found, not made
    """Every module that ``fully_shard`` or FSDP's older wrapper has taken, for `isinstance`.

    By name: importing torch.distributed.fsdp costs half a second, and whoever has a sharded module
    has paid it already.
    """

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        names = {one.__name__ for one in kind.__mro__}
        return not names.isdisjoint({"FSDPModule", "FullyShardedDataParallel"})


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside what `wrap_model` and ``torch.compile`` put around it.

    It takes off DataParallel, DistributedDataParallel and strategy ``"exact"``, in any nesting. A
    module that is not wrapped, or that ``fully_shard`` changed in place (strategy ``"fsdp"``),
    comes back as it is. Not collective.

    Raises:
        TypeError: `model` is no module.

    >>> import torch
    >>> net = torch.nn.Linear(2, 2)
    >>> unwrap(torch.nn.DataParallel(net)) is net
    True
    """
    check_module(model)
    return wrapper_chain(model)[-1]


def wrapper_chain(model: nn.Module) -> list[nn.Module]:
    """Return `model` and, from the outside to the inside, what its wrappers wrap."""
    found = [model]
    while (inner := _inside(found[-1])) is not None:
        found.append(inner)
    return found


def is_parallel(model: nn.Module, *, but_for_sharded_parts: bool = False) -> bool:
    """Whether `model` is, or holds at any depth, a module that a strategy has wrapped."""
    parts = wrapper_chain(model)[-1:] if but_for_sharded_parts else model.modules()
    is_sharded = any(isinstance(part, ShardedModule) for part in parts)
    return is_sharded or any(map(_is_wrapper, model.modules()))


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, DataParallel | DistributedDataParallel | Wrapper)


def _inside(model: nn.Module) -> nn.Module | None:
    # torch.compile's OptimizedModule; importing its class would import all of dynamo.
    name = "_orig_mod" if type(model).__name__ == "OptimizedModule" else "module"
    # As it lies there: what reads through would look further.
    is_outer = name == "_orig_mod" or _is_wrapper(model)
    return dict(model.named_children()).get(name) if is_outer else None
