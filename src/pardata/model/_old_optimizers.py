"""An optimizer of parameters that sharding has replaced: its steps would train nothing."""

import gc
import weakref
from typing import TypeAlias

import torch
from torch import nn

_Remembered: TypeAlias = dict[int, weakref.ref[nn.Parameter]]


def remembered(module: nn.Module) -> _Remembered:
    """Return the parameters by their identity, without keeping them."""
    return {id(parameter): weakref.ref(parameter) for parameter in module.parameters()}


def refuse_old_optimizers(module: nn.Module, before: _Remembered) -> None:
    """Let the first forward raise if an optimizer has parameters that `module` has no more.

    Later ones pay nothing. A compiled forward does not look.
    """
    replaced = [before[key] for key in before.keys() - remembered(module).keys()]

    def look(*_: object) -> None:
        if torch.compiler.is_compiling():
            return
        alive = (ref() for ref in replaced)
        if old := {id(parameter) for parameter in alive if parameter is not None}:
            _look_for_optimizers(old)
        handle.remove()

    handle = module.register_forward_pre_hook(look, prepend=True)


def _look_for_optimizers(old: set[int]) -> None:
    """Raise if an optimizer has one of these parameters: whoever else has one may have a reason."""
    gc.collect()  # the optimizer may have been replaced since
    for one in gc.get_objects():
        if issubclass(type(one), torch.optim.Optimizer):
            own = [id(parameter) for group in one.param_groups for parameter in group["params"]]
            if lost := len(old.intersection(own)):
                raise RuntimeError(
                    f"the optimizer must have the parameters of the wrapped model, but {lost} of "
                    f"the {len(own)} in {type(one).__name__} are those that wrap_model(…, 'fsdp') "
                    f"has replaced, so that its steps would train nothing: make the optimizer "
                    f"after wrap_model"
                )
