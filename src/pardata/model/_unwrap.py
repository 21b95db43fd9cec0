"""`unwrap` and the chain of wrappers around a module."""

from abc import ABC
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pardata._validation import check_module


class Wrapper(nn.Module):
    """A wrapper that is no subclass of PyTorch's wrappers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*inputs, **kwargs)


class Versioned:
    """The base class of wrappers that record facts in the metadata of a state dict."""

    def check_versions(self, facts: Mapping[str, Any]) -> None:
        """Raise if the metadata forbids to load it."""


class ShardedModule(ABC):  # noqa: B024  # only for isinstance
    """The class of modules sharded by ``fully_shard`` or FSDP's older wrapper, for `isinstance`.

    It compares class names, because importing torch.distributed.fsdp takes half a second.
    """

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        names = {one.__name__ for one in kind.__mro__}
        return not names.isdisjoint({"FSDPModule", "FullyShardedDataParallel"})


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of `wrap_model` and ``torch.compile``.

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
    """Return `model` and the modules inside its wrappers, from the outside to the inside."""
    found = [model]
    while (inner := _inside(found[-1])) is not None:
        found.append(inner)
    return found


def is_parallel(model: nn.Module, *, but_for_sharded_parts: bool = False) -> bool:
    """Whether `model`, or a module in it at any depth, is wrapped by a strategy."""
    parts = wrapper_chain(model)[-1:] if but_for_sharded_parts else model.modules()
    is_sharded = any(isinstance(part, ShardedModule) for part in parts)
    return is_sharded or any(map(_is_wrapper, model.modules()))


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, DataParallel | DistributedDataParallel | Wrapper)


def _inside(model: nn.Module) -> nn.Module | None:
    # By its name, because importing OptimizedModule would import all of dynamo.
    name = "_orig_mod" if type(model).__name__ == "OptimizedModule" else "module"
    # By `named_children`, because a transparent wrapper would pass `getattr` on.
    is_outer = name == "_orig_mod" or _is_wrapper(model)
    return dict(model.named_children()).get(name) if is_outer else None
