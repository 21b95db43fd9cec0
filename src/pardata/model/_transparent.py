"""Wrappers that pass attribute access and state dicts on to their module.

They are subclasses of PyTorch's wrappers. Attributes, ``state_dict`` and ``load_state_dict`` are
the module's, so a script for the bare module also runs with a wrapper.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from pardata.environment._device import in_backward
from pardata.environment._logger import get_logger
from pardata.model._state_dict import NO_ASSIGN, LoadedKeys, load_full
from pardata.model._unwrap import Versioned, unwrap

_log = get_logger(__name__)


class TransparentWrapper(nn.Module):
    """The base class of transparent wrappers, to be listed before PyTorch's class."""

    module: nn.Module
    _inside: nn.Module

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        # After PyTorch's __init__, in which every attribute belongs to the wrapper.
        self.__dict__.update(_inside=unwrap(module), _transparent=True)
        self._log_hidden_names()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or "module" not in self.__dict__.get("_modules", {}):
                raise
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._owns(name):
            super().__setattr__(name, value)
        elif isinstance(value, nn.Parameter | nn.Module):
            self._refuse_assignment(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._owns(name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def _owns(self, name: str) -> bool:
        if "_transparent" not in self.__dict__ or name.startswith("_"):
            return True
        return name in self.__dict__ or hasattr(type(self), name)

    def _refuse_assignment(self, name: str, value: object) -> None:
        if "_transparent" in self.__dict__:
            kind = "Module" if isinstance(value, nn.Module) else "Parameter"
            raise TypeError(
                f"`{name}` must be set before wrap_model, but a {kind} is set on the wrapped model"
            )

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register the buffer on the module, where it is saved and synchronized."""
        self.module.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Raise, because PyTorch's wrappers synchronize only the parameters of their creation."""
        self._refuse_assignment(name, param)
        super().register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Raise, as `register_parameter` does."""
        self._refuse_assignment(name, module)
        super().add_module(name, module)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the module inside, without the prefix ``module.``."""
        return self._inside.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> LoadedKeys:
        """Load weights as `load_weights` does."""
        return load_full(self, state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kw: Any) -> None:
        # Called if the wrapper is a child of the module that loads. PyTorch then looks for keys
        # with the wrapper's prefix, so the keys are renamed in `state_dict` first.
        if isinstance(self, Versioned):
            self.check_versions(args[0])
        if args[0].get("assign_to_params_buffers"):
            raise ValueError(NO_ASSIGN)
        path = next(path for path, module in self.named_modules() if module is self._inside)
        inside = f"{prefix}{path}."
        names = self._inside.state_dict(prefix=prefix)
        wanted = {name: inside + name[len(prefix) :] for name in names if name in state_dict}
        if not any(name in state_dict for name in wanted.values() if name not in names):
            state_dict.update({long: state_dict.pop(name) for name, long in wanted.items()})
        super()._load_from_state_dict(state_dict, prefix, *args, **kw)

    def _log_hidden_names(self) -> None:
        """Warn of attributes of the wrapper that hide different ones of the module."""
        hiding = {*vars(self), *self._modules, *dir(type(self))}
        names = {*dir(self.module)} - {*dir(nn.Module), "training"}
        for name in sorted(name for name in names & hiding if not name.startswith("_")):
            with suppress(Exception):  # a user's property may raise anything
                if getattr(self, name) == getattr(self.module, name):
                    continue
            hides = f"{type(self).__name__} hides `{name}` of {type(self.module).__name__}"
            _log.warning("%s: read unwrap(model).%s", hides, name, ranks=[0], once=True)


@contextmanager  # also used as a decorator
def forbid_unsynced_forward(wrapper: Any, name: str) -> Iterator[None]:
    """Raise if a block, or a method, runs modules whose gradients would not be synchronized.

    Args:
        wrapper: the DDP wrapper.
        name: the name of the method, for the error.
    """

    def refuse(module: nn.Module, _args: object) -> None:
        runs = wrapper._forward_runs  # noqa: SLF001  # a public name would hide a name of the module
        # Recomputation of activation checkpointing.
        if runs or not torch.is_grad_enabled() or in_backward():
            return
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if trains and any(part is module for part in wrapper.module.modules()):
            raise RuntimeError(
                f"`{name}` must not run {type(module).__name__} with gradients outside of the "
                f"model's forward: call it there, under torch.no_grad(), or as unwrap(model).{name}"
            )

    # One global hook during the call, because its cost does not depend on the number of modules.
    with nn.modules.module.register_module_forward_pre_hook(refuse):
        yield
